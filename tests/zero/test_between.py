"""What lies between backward and step, and around them: whatever a script does there, it trains as a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.train.parity import weight_distance
from harness.train.ranks import run_on_ranks
from harness.train.zoo import WIDTH, Plain, batches
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import launcher
from launcher.base.errors import EngineError
from launcher.zero.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_local_fp32_param,
)
from launcher.zero.gathered import GatheredParameters
from launcher.zero.parameters import full_shape
from launcher.zero.states import ParameterState
from launcher.zero.step import first_bad_gradient
from launcher.zero.unit import unit_of

LR = 0.05
NUM_BATCHES = 8


def _networks() -> list[nn.Module]:
    torch.manual_seed(17)
    return [Plain(), Plain()]


def _batch(index: int, world_size: int, rank: int) -> tuple[Tensor, Tensor]:
    x, y = batches(NUM_BATCHES)[index % NUM_BATCHES]
    return x.chunk(world_size)[rank], y.chunk(world_size)[rank]


class PlainLoop:
    """Two models in one process, as the operations would be written without an engine."""

    def __init__(self) -> None:
        self.models = _networks()
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in self.models]

    def __call__(self, which: int, batch: int) -> Tensor:
        return self.models[which](*_batch(batch, 1, 0))  # type: ignore[no-any-return]

    def part(self, batch: int) -> Tensor:
        return self.models[0].blocks[0](_batch(batch, 1, 0)[0]).square().mean()  # type: ignore[no-any-return]

    def backward(self, which: int, loss: Tensor, *, retains: bool = False) -> None:
        params = list(self.models[which].parameters())
        grads = torch.autograd.grad(loss, params, retain_graph=retains, allow_unused=True)
        for param, grad in zip(params, grads, strict=True):
            if grad is not None:
                param.grad = grad if param.grad is None else param.grad + grad

    def step(self, which: int) -> None:
        self.optimizers[which].step()
        self.optimizers[which].zero_grad()

    def modes(self, is_training: bool) -> None:
        self.models[0].train(is_training)

    def read(self) -> float:
        return sum(param.sum().item() for param in self.models[0].parameters())

    state_sum = masters = read

    def write(self) -> list[Any]:
        with torch.no_grad():
            self.models[0].blocks[1].down.weight.mul_(0.9)
        return []

    def set(self) -> list[Any]:
        with torch.no_grad():
            self.models[0].head.weight.fill_(0.05)
        return []

    def load(self) -> list[Any]:
        self.models[0].load_state_dict({name: 0.95 * value for name, value in self.models[0].state_dict().items()})
        return []

    def gradient(self) -> float:
        grad = self.models[0].head.weight.grad
        return 0.0 if grad is None else grad.sum().item()

    def set_gradient(self) -> list[Any]:
        grad = self.models[0].head.weight.grad
        if grad is not None:
            grad.fill_(0.25)
        return []


class EngineLoop:
    """The same operations on engines, of which this rank is one."""

    def __init__(self, rank: int, world_size: int, config: dict[str, Any], num_engines: int = 1) -> None:
        self._place = world_size, rank
        models = _networks()[:num_engines]
        self.engines = [launcher.initialize(model=model, config=config)[0] for model in models]
        self._dtype = self.engines[0].get_data_types()[0]

    def __call__(self, which: int, batch: int) -> Tensor:
        x, y = _batch(batch, *self._place)
        return self.engines[which](x.to(self._dtype), y.to(self._dtype))  # type: ignore[no-any-return]

    def part(self, batch: int) -> Tensor:
        x = _batch(batch, *self._place)[0].to(self._dtype)
        return self.engines[0].module.blocks[0](x).square().mean()  # type: ignore[no-any-return]

    def backward(self, which: int, loss: Tensor, *, retains: bool = False) -> None:
        self.engines[which].backward(loss, retain_graph=retains, scale_wrt_gas=False)

    def step(self, which: int) -> None:
        self.engines[which].step()

    def modes(self, is_training: bool) -> None:
        self.engines[0].train(is_training)

    def read(self) -> float:
        with GatheredParameters(self.engines[0].parameters()):
            return sum(param.sum().item() for param in self.engines[0].parameters())

    def state_sum(self) -> float:
        return sum(value.sum().item() for value in self.engines[0].state_dict().values())

    def masters(self) -> float:
        found = [safe_get_full_fp32_param(param) for param in self.engines[0].parameters()]
        return sum(value.sum().item() for value in found if value is not None)

    def write(self) -> list[Any]:
        weight = self.engines[0].module.blocks[1].down.weight
        with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
            weight.mul_(0.9)
        return []

    def set(self) -> list[Any]:
        weight = self.engines[0].module.head.weight
        safe_set_full_fp32_param(weight, torch.full((1, WIDTH), 0.05))
        return []

    def load(self) -> list[Any]:
        self.engines[0].load_state_dict({name: 0.95 * value for name, value in self.engines[0].state_dict().items()})
        return []

    def gradient(self) -> float:
        grad = safe_get_full_grad(self.engines[0].module.head.weight)
        return 0.0 if grad is None else grad.sum().item()

    def set_gradient(self) -> list[Any]:
        weight = self.engines[0].module.head.weight
        if safe_get_full_grad(weight) is not None:
            safe_set_full_grad(weight, torch.full((1, WIDTH), 0.25))
        return []


def _joint(loop: Any, batch: int) -> list[Tensor]:
    """Two engines, one loss: both backwards come before the first step."""
    loss = loop(0, batch) + loop(1, batch)
    loop.backward(0, loss, retains=True)
    loop.backward(1, loss)
    loop.step(0)
    loop.step(1)
    return [loss]


def _train(loop: Any, batch: int) -> list[Tensor]:
    loss = loop(0, batch)
    loop.backward(0, loss)
    return [loss]


def _evaluate(loop: Any, batch: int) -> list[Tensor]:
    loop.modes(False)
    loss = loop(0, batch)
    loop.modes(True)
    return [loss]


@torch.no_grad()
def _look(loop: Any, batch: int) -> list[Tensor]:
    return [loop(0, batch)]


def _part_back(loop: Any, batch: int) -> list[Tensor]:
    loss = loop.part(batch)
    loop.backward(0, loss)
    return [loss]


def _saliency(loop: Any, batch: int) -> list[Tensor]:
    """A gradient of something else than the parameters, outside of `engine.backward`."""
    bias = torch.zeros((), requires_grad=True)
    (grad,) = torch.autograd.grad((loop(0, batch) + bias).square(), bias)
    return [grad]


# Each returns losses, of this rank's samples, and numbers that are alike on every rank.
OPERATIONS: dict[str, Callable[[Any, int], list[Any]]] = {
    "train": _train,
    "forward": lambda loop, batch: [loop(0, batch)],
    "evaluate with gradients": _evaluate,
    "look": _look,
    "part": lambda loop, batch: [loop.part(batch)],
    "part and back": _part_back,
    "joint": _joint,
    "saliency": _saliency,
    "read": lambda loop, batch: [loop.read()],
    "state dict": lambda loop, batch: [loop.state_sum()],
    "masters": lambda loop, batch: [loop.masters()],
    "gradient": lambda loop, batch: [loop.gradient()],
    "set gradient": lambda loop, batch: loop.set_gradient(),
    "write": lambda loop, batch: loop.write(),
    "set": lambda loop, batch: loop.set(),
    "load": lambda loop, batch: loop.load(),
}


def _run(loop: Any, names: list[str]) -> list[Any]:
    """Do the operations; a "step" where nothing has gone back since the last one is left out."""
    found: list[Any] = []
    has_gradients = False
    for batch, name in enumerate(names):
        if name == "step" and has_gradients:
            loop.step(0)
        elif name != "step":
            found += OPERATIONS[name](loop, batch)
        has_gradients = (has_gradients and name not in ("step", "joint")) or name in ("train", "part and back")
    return [value.detach() if isinstance(value, Tensor) else value for value in found]


def _engines(rank: int, world_size: int, config: dict[str, Any], names: list[str]) -> tuple[list[Any], dict[str, Any]]:
    loop = EngineLoop(rank, world_size, config, num_engines=2 if "joint" in names else 1)
    found = _run(loop, names)
    return found, loop.engines[0].state_dict()


def _config(zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "steps_per_print": 0,
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        **more,
    }


def _check(world_size: int, config: dict[str, Any], names: list[str], tolerance: float = 1e-4) -> None:
    plain = PlainLoop()
    expected = _run(plain, names)
    ranks = run_on_ranks(world_size, _engines, config, names)
    for number, values in enumerate(zip(expected, *(found for found, _ in ranks), strict=True)):
        wanted, *parts = (float(value) for value in values)
        mean = sum(parts) / world_size
        assert mean == pytest.approx(wanted, rel=tolerance, abs=tolerance), f"{number} of {names}"
    for _, weights in ranks:
        assert weight_distance(weights, dict(plain.models[0].state_dict())) <= tolerance, names


BETWEEN = [name for name in OPERATIONS if name != "train"]


@pytest.mark.parametrize("kind", ["as it is", "sharded after each use"])
@pytest.mark.parametrize("name", BETWEEN)
def test_between_backward_and_step(name: str, kind: str) -> None:
    _check(2, _config_of(3, kind), [*(3 * ["train", name, "step"]), "forward"])


@pytest.mark.parametrize("name", ["write", "set", "load"])
def test_what_is_written_in_16_bits(name: str) -> None:
    """The masters keep their bits."""
    _check_kind("bf16", 3 * ["train", "step", name, "train", "step", "forward"])


_DELAYED = {"offload_optimizer": {"device": "cpu", "delayed_update": True, "delayed_update_warmup_steps": 1}}
_OVERFLOWS = {"fp16": {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}}


def _config_of(stage: int, kind: str) -> dict[str, Any]:
    host = {"device": "cpu"}
    more: dict[str, dict[str, Any]] = {
        "sharded after each use": {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
        "MiCS": {"mics_shard_size": 2},
        "MiCS, sums sent whole": {"mics_shard_size": 2, "reduce_scatter": False},
        "MiCS on host": {"mics_shard_size": 2, "offload_optimizer": host},
        "hpZ": {"zero_hpz_partition_size": 2},
        "host": {"offload_param": host, "offload_optimizer": host},
        "delayed": _DELAYED,
    }
    precision: dict[str, dict[str, Any]] = {
        "autocast": {"torch_autocast": {"enabled": True}},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": _OVERFLOWS,
    }
    return _config({"stage": stage, **more.get(kind, {})}, **precision.get(kind, {}))


# Stage and ranks. What rounds, or lags behind, is compared with stage 2. Stage 3 on two ranks, sharded after each use,
# on host or on disk: the programs of tests/engine/test_sequences.py.
KINDS = {
    "hpZ": (3, 4),
    "delayed": (3, 2),
    "autocast": (3, 2),
    "bf16": (3, 2),
    "fp16": (3, 2),
    "MiCS": (3, 4),
    "MiCS, sums sent whole": (3, 4),
    "MiCS on host": (3, 4),
    "stage 2": (2, 2),
    "stage 1": (1, 4),
    "stage 0": (0, 2),
}


def _check_kind(kind: str, names: list[str]) -> None:
    stage, world_size = KINDS[kind]
    config = _config_of(stage, kind)
    if kind not in ("delayed", "autocast", "bf16", "fp16"):
        _check(world_size, config, names)
        return
    expected = run_on_ranks(world_size, _engines, _config_of(2, kind), names)
    for (found, weights), (wanted, wanted_weights) in zip(
        run_on_ranks(world_size, _engines, config, names), expected, strict=True
    ):
        numbers = [float(value) for value in found]
        assert numbers == pytest.approx([float(value) for value in wanted], rel=1e-4, abs=1e-4, nan_ok=True), names
        assert weight_distance(weights, wanted_weights) <= 1e-4, names


_names = st.one_of(st.sampled_from(["train", "step"]), st.sampled_from([*OPERATIONS, "step"]))


@pytest.mark.parametrize("kind", KINDS)
def test_any_order(kind: str) -> None:
    """Sequences of calls that hypothesis draws."""

    @settings(max_examples=5, derandomize=True)
    @given(st.lists(_names, min_size=3, max_size=16))
    def check(names: list[str]) -> None:
        _check_kind(kind, [*names, "train", "step", "forward"])

    check()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "MiCS" in kind or "stage" in kind])
def test_gradients_that_wait_for_the_step_are_read_and_set_whole(kind: str) -> None:
    names = ["train", "gradient", "train", "set gradient", "train", "gradient", "step", "train", "set gradient", "step"]
    _check_kind(kind, [*names, "train", "set gradient", "train", "step", "forward"])


def _local_gradients(rank: int, world_size: int, kind: str) -> float:
    """Read this rank's part before its sum is there, which is an error, and after."""
    loop = EngineLoop(rank, world_size, _config_of(KINDS[kind][0], kind))
    weight = loop.engines[0].module.head.weight
    _train(loop, 0)
    with pytest.raises(EngineError, match="not summed over all ranks yet"):
        safe_get_local_grad(weight)
    whole, part = safe_get_full_grad(weight), safe_get_local_grad(weight)
    assert whole is not None
    assert part is not None
    assert set(part.tolist()) <= set(whole.flatten().tolist())
    loop.step(0)
    assert safe_get_full_grad(weight) is None
    return float(part.numel())


@pytest.mark.parametrize("kind", ["MiCS", "stage 1"])
def test_a_part_of_a_gradient_that_waits_for_the_step_is_an_error(kind: str) -> None:
    world_size = KINDS[kind][1]
    num_copies = 2 if kind == "MiCS" else 1
    assert sum(run_on_ranks(world_size, _local_gradients, kind)) == num_copies * WIDTH


# ---- what is open across a step ----


def _open(rank: int, world_size: int) -> list[float]:
    """Step within a block, which is an error, then after it; and load within another."""
    loop = EngineLoop(rank, world_size, _config({"stage": 3}))
    engine, weight = loop.engines[0], loop.engines[0].module.head.weight
    _train(loop, 0)
    with GatheredParameters(weight), pytest.raises(EngineError, match=r"within a block of .*GatheredParameters that"):
        engine.step()
    engine.zero_grad()
    _train(loop, 0)
    engine.step()
    stepped = loop.masters()
    with GatheredParameters(weight):
        _train(loop, 1)  # a pass within does not end the block
        before = weight.sum().item()
        loop.load()
        loaded = weight.sum().item()
    assert loaded == pytest.approx(0.95 * before)
    loop(0, 2)
    with pytest.raises(EngineError, match="is unsharded"):
        safe_set_local_fp32_param(weight, torch.zeros(0))
    engine.step()
    return [stepped, loop.masters()]


def test_a_block_that_is_open_across_a_step_is_an_error() -> None:
    plain = PlainLoop()
    _train(plain, 0)
    plain.step(0)
    expected = [plain.masters()]
    _train(plain, 1)
    plain.load()
    plain.step(0)
    for found in run_on_ranks(2, _open):
        assert found == pytest.approx([*expected, plain.masters()], rel=1e-5)


class _LooksWithin(Plain):
    """A forward that gathers what it is about to read."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            with GatheredParameters(self.head.weight), GatheredParameters(block.parameters()):
                x = block(x) * block.up.weight.detach().square().mean()
        return x


def _within(rank: int, world_size: int, stage: int, precision: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(3)
    engine = launcher.initialize(model=_LooksWithin(), config=_config({"stage": stage}, **precision))[0]
    for index in range(3):
        engine.backward(engine(*_batch(index, world_size, rank)))
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("precision", [{}, {"torch_autocast": {"enabled": True}}], ids=["fp32", "autocast"])
def test_blocks_within_a_forward(precision: dict[str, Any]) -> None:
    expected = run_on_ranks(2, _within, 2, precision)[0]
    for weights in run_on_ranks(2, _within, 3, precision):
        assert weight_distance(weights, expected) <= 1e-5


def _goes_back_late(loop: Any) -> list[Tensor]:
    """Have graphs go back that read weights which were written since, in each way; then train."""
    for name in ("step", "write", "set", "load"):
        early = loop(0, 0)
        if name == "step":
            loop.backward(0, loop(0, 1))
            loop.step(0)
        else:
            getattr(loop, name)()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loop.backward(0, early)
    loop.backward(0, loop(0, 2))
    loop.step(0)
    return [loop(0, 3)]


def _goes_back_late_on_ranks(rank: int, world_size: int, config: dict[str, Any]) -> float:
    return _goes_back_late(EngineLoop(rank, world_size, config))[0].item()


@pytest.mark.parametrize(
    "kind", ["stage 0", "stage 1", "stage 2", "as it is", "sharded after each use", "MiCS", "host"]
)
def test_a_graph_that_goes_back_after_its_weights_were_written_is_an_error(kind: str) -> None:
    """As in a plain loop, and on every rank, also where one rank has written."""
    stage, world_size = KINDS.get(kind, (3, 2))
    found = run_on_ranks(world_size, _goes_back_late_on_ranks, _config_of(stage, kind))
    assert sum(found) / world_size == pytest.approx(_goes_back_late(PlainLoop())[0].item(), rel=1e-4)


# ---- what is fetched, and what is said, of which unit ----


def _states_after_first_block(rank: int, world_size: int, prefetch: int) -> list[bool]:
    """Return, by block, whether it is a shard when the first one's forward has ended, and the path is known."""
    zero = {"stage": 3, "stage3_prefetch_bucket_size": prefetch, "stage3_max_reuse_distance": 0}
    loop = EngineLoop(rank, world_size, _config(zero))
    blocks = loop.engines[0].module.blocks
    units = [unit_of(block.up.weight) for block in blocks]  # to read the weight within the forward would gather it
    found: list[bool] = []

    def look(*_: Any) -> None:
        found[:] = [unit is not None and unit.params.state is ParameterState.SHARDED for unit in units]

    for index in range(3):
        if index == 2:
            blocks[0].register_forward_hook(look)
        _train(loop, index)
        loop.step(0)
    return found


@pytest.mark.parametrize(("prefetch", "expected"), [(0, [True] * 4), (1, [True, False, True, True])])
def test_without_a_bucket_nothing_is_fetched_ahead(prefetch: int, expected: list[bool]) -> None:
    assert run_on_ranks(2, _states_after_first_block, prefetch) == [expected] * 2


def _first_bad(rank: int, world_size: int, stage: int) -> str | None:
    loop = EngineLoop(rank, world_size, _config({"stage": stage, "reduce_bucket_size": WIDTH * WIDTH}))
    sharded = loop.engines[0]._sharded
    assert len(sharded.units) > 2
    _train(loop, 0)
    for weight in (loop.engines[0].module.blocks[2].down.weight, loop.engines[0].module.blocks[3].scale):
        safe_set_full_grad(weight, torch.full(full_shape(weight), torch.inf))
    return first_bad_gradient(sharded.units, sharded.reducer.group)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_first_bad_gradient_is_named_in_any_unit(stage: int) -> None:
    assert run_on_ranks(2, _first_bad, stage) == ["blocks.2.down.weight"] * 2
