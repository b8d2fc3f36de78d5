"""What is computed, kept and sent in which precision, and what is said when numbers run out of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from harness.logs import logged
from harness.train.adamw import engines_adamw
from harness.train.parity import limit, weight_distance
from harness.train.ranks import run_on_ranks
from harness.train.zoo import LR, SAMPLES, WEIGHT_DECAY, WIDTH, batches, build, train_plain
from torch import Tensor, nn

import launcher
from launcher.base.errors import EngineError
from launcher.comm.communicator import GlooCommunicator
from launcher.engine.casting import set_tf32
from launcher.optim.scaling import MAX_OVERFLOWS_AT_MINIMUM

STEPS = 2
SHARDED = {"stage3_param_persistence_threshold": 0}


def start(world_size: int, stage: int, model: str = "Plain", **more: Any) -> Any:
    zero = {"stage": stage, **SHARDED, **more.pop("zero", {})}
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        **more,
    }
    return launcher.initialize(model=build(model), config=config)[0]


def train(engine: Any, rank: int, world_size: int, factor: float = 1.0, num_steps: int = STEPS) -> dict[str, Tensor]:
    part = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
    dtype = next(engine.module.parameters()).dtype
    for x, y in batches(num_steps):
        engine.backward(engine(x[part].to(dtype), y[part].to(dtype)).float() * factor)
        engine.step()
    return engine.state_dict()


# ---- the loss scale ----


def _overflows(rank: int, world_size: int, stage: int) -> tuple[list[str], list[float], list[float]]:
    engine = start(world_size, stage, fp16={"enabled": True, "initial_scale_power": 18, "hysteresis": 1})
    x, y = (tensor.half() for tensor in batches(1)[0])
    before = engine.state_dict()
    with logged() as lines:
        loss = engine(x, y).float() / 1000
        if rank == 1:  # its gradient leaves the range of fp16
            loss = loss + (engine.module.head.bias.float() * 1e6).sum()
        engine.backward(loss)
        engine.step()
        skipped = engine.optimizer.overflow, engine.skipped_steps
        assert skipped == (True, 1)
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
        engine.backward(engine(x, y).float() / (math.nan if rank == 1 else 1000))
        engine.step()
        assert engine.get_global_grad_norm() == math.inf
        engine.backward(engine(x, y).float() / 1000)
        engine.step()
    scales = [engine.optimizer.cur_scale, engine.optimizer.loss_scale, engine.loss_scale()]
    assert engine.dynamic_loss_scale()
    return lines, scales, [engine.get_global_grad_norm(), engine.global_steps]


@pytest.mark.parametrize("stage", [0, 1, 2])  # at stage 3 the parameter is not there outside of the forward
def test_an_overflow_on_one_rank_skips_the_step_on_all(stage: int) -> None:
    (lines, scales, (norm, num_steps)), (other_lines, *other) = run_on_ranks(2, _overflows, stage)
    assert lines == [
        "OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 262144, reducing to 131072 "
        "(step 1 skipped: the gradient norm is inf, first in head.bias)",
        "OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 131072, reducing to 65536 "
        "(step 2 skipped: the loss is nan on rank 1)",
    ]
    assert other_lines == []
    assert other == [scales, [norm, num_steps]]
    assert scales == [65536.0, 65536.0, 0.0]
    assert num_steps == 3
    assert 0 < norm < 0.01  # of the unscaled gradients


def test_overflows_that_no_scale_can_help_end_the_run() -> None:
    engine = start(1, 1, fp16={"enabled": True, "initial_scale_power": 0})
    x, y = (tensor.half() for tensor in batches(1)[0])
    for _ in range(MAX_OVERFLOWS_AT_MINIMUM):
        engine.backward(engine(x, y).float() * 1e30)
        engine.step()
    engine.backward(engine(x, y).float() * 1e30)
    with pytest.raises(EngineError, match="the loss scale is at its minimum") as caught:
        engine.step()
    assert engine.skipped_steps == MAX_OVERFLOWS_AT_MINIMUM
    assert caught.value.diagnostics[0].hint == "use bf16, which has the range of fp32, or fp32"


def test_the_scale_is_part_of_the_optimizer_state() -> None:
    engines = [start(1, 0, fp16={"enabled": True, "initial_scale_power": power}) for power in (4, 8)]
    engines[1].optimizer.load_state_dict(engines[0].optimizer.state_dict())
    assert engines[1].optimizer.cur_scale == 16.0


def test_inputs_are_cast_where_asked() -> None:
    x, y = batches(1)[0]
    engine = start(1, 0, fp16={"enabled": True, "auto_cast": True})
    assert engine(x, y=y).dtype == torch.float16
    with pytest.raises(RuntimeError, match="dtype"):
        start(1, 0, fp16={"enabled": True})(x, y)


def test_a_bf16_step_that_is_not_finite_is_taken_where_asked() -> None:
    engine = start(1, 0, bf16={"enabled": True, "check_grad_overflow": False})
    x, y = (tensor.bfloat16() for tensor in batches(1)[0])
    with logged() as lines:
        engine.backward(engine(x, y) * math.nan)
        engine.step()
    assert engine.skipped_steps == 0
    assert engine.module.head.weight.isnan().all()
    assert lines == ["step 1 taken all the same: the loss is nan on rank 0"]


# ---- what is kept ----

KEPT: dict[str, dict[str, Any]] = {
    "bf16 masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "bf16 masters and states": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    },
    "bf16 sums": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    "fp16 masters": {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True, "initial_scale_power": 8}},
    "fp16 sums": {
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "data_types": {"grad_accum_dtype": "fp16"},
    },
}


def _kept(rank: int, world_size: int, stage: int, name: str) -> tuple[dict[str, Tensor], set[Any]]:
    engine = start(world_size, stage, **KEPT[name])
    weights = train(engine, rank, world_size)
    dtypes = set()
    for unit in engine._sharded.units:
        state = unit.optimizer_state("exp_avg")
        if state is not None:  # a rank may own nothing but padding
            dtypes.add((unit.params.master.dtype, unit.grads.owned_grad.dtype, state.dtype))
    return weights, dtypes


def train_kept(name: str, world_size: int) -> dict[str, Tensor]:
    """The same in plain torch: 16-bit gradients of each part, their mean rounded, an update in fp32, rounded."""
    dtype = torch.bfloat16 if "bf16" in KEPT[name] else torch.float16
    scale = 256.0 if dtype == torch.float16 else 1.0
    has_states, has_sums = "states" in name, "sums" in name
    model = build("Plain").to(dtype)
    params = list(model.parameters())
    masters = params if has_states else [param.detach().float() for param in params]
    optimizer = engines_adamw(masters, lr=LR, weight_decay=WEIGHT_DECAY)
    for x, y in batches(STEPS):
        sums = [torch.zeros_like(param, dtype=torch.float32) for param in params]
        for part, target in zip(x.to(dtype).chunk(world_size), y.to(dtype).chunk(world_size), strict=True):
            grads = torch.autograd.grad(model(part, target).float() * scale, params)
            for total, grad in zip(sums, grads, strict=True):
                total += grad
        for master, total in zip(masters, sums, strict=True):
            kept = (total / world_size).to(dtype)
            master.grad = kept if has_states else kept.float() / scale
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
                if not has_sums:
                    master.copy_(param)
    return dict(model.state_dict())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_in_16_bits(name: str, stage: int) -> None:
    dtype = torch.bfloat16 if "bf16" in KEPT[name] else torch.float16
    master = torch.float32 if "sums" in name else dtype
    state = dtype if "states" in name else torch.float32
    expected = train_kept(name, 2)
    for weights, dtypes in run_on_ranks(2, _kept, stage, name):
        assert dtypes == {(master, dtype, state)}
        for key, weight in expected.items():
            assert torch.equal(weights[key], weight), key


@pytest.mark.parametrize(
    ("given", "expected"), [(None, torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_buffers_are_of_the_type_asked_for(given: str | None, expected: torch.dtype) -> None:
    model = nn.BatchNorm1d(4)
    model.running_mean.fill_(1 / 3)  # type: ignore[union-attr, operator]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "data_types": {"param_dtype": "bf16", "buffer_dtype": given},
        "optimizer": {"type": "SGD"},
    }
    launcher.initialize(model=model, config=config)
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.running_mean, torch.full((4,), 1 / 3).to(expected))  # type: ignore[arg-type]
    assert model.num_batches_tracked.dtype == torch.int64  # type: ignore[union-attr]


class Rotary(nn.Module):
    """Turns pairs of features by complex numbers, as Llama's reference code does; two modules share the table."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.register_buffer("steps", torch.full((), 1 / 3, dtype=torch.float64))
        self.last.register_buffer("turns", self.turns)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.first(x).float().unflatten(-1, (4, 2))) * self.turns
        out = self.last(torch.view_as_real(turned * self.last.turns).flatten(-2).to(x.dtype))
        return (out * self.steps.to(x.dtype)).square().mean()


def _rotary(rank: int, world_size: int, stage: int, dtype: str) -> tuple[list[float], list[torch.dtype], bool]:
    torch.manual_seed(3)
    model = Rotary()
    if rank:
        model.turns.mul_(2.0)  # type: ignore[operator]  # rank 0's values count
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine = launcher.initialize(model=model, config=config)[0]
    losses = []
    for _ in range(3):
        loss = engine(torch.ones(2, 8, dtype=next(model.parameters()).dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, [buffer.dtype for buffer in model.buffers()], model.turns is model.last.turns


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_complex_and_float64_buffers_stay_what_they_are(stage: int) -> None:
    torch.manual_seed(3)
    model = Rotary()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        loss = model(torch.ones(2, 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for losses, dtypes, is_shared in run_on_ranks(2, _rotary, stage, "fp32"):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert (dtypes, is_shared) == ([torch.complex64, torch.float64], True)
    for losses, dtypes, _ in run_on_ranks(2, _rotary, stage, "bf16"):
        assert losses == pytest.approx(expected, rel=0.05)
        assert dtypes == [torch.complex64, torch.float64]


# ---- what is sent ----


@contextlib.contextmanager
def sent_dtypes() -> Iterator[set[torch.dtype]]:
    """Collect the types of what reductions send."""
    found: set[torch.dtype] = set()
    original = GlooCommunicator._reduce_scatter

    def recording(own: GlooCommunicator, flat: Tensor, output: Tensor, scale: float) -> Any:
        found.add(flat.dtype)
        return original(own, flat, output, scale)

    with mock.patch.object(GlooCommunicator, "_reduce_scatter", recording):
        yield found


SENT: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "fp32": ({}, torch.float32),
    "fp32 as bf16": ({"communication_data_type": "bf16"}, torch.bfloat16),
    "fp32 as fp16": ({"communication_data_type": "fp16"}, torch.float16),
    "bf16": ({"bf16": {"enabled": True}}, torch.bfloat16),
    "bf16 as fp32": ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, torch.float32),
    "fp16": ({"fp16": {"enabled": True, "initial_scale_power": 8}}, torch.float16),
    "prescaled": ({"prescale_gradients": True}, torch.float32),
    "predivided": ({"gradient_predivide_factor": 3.0}, torch.float32),
    "all-reduced": ({"zero": {"reduce_scatter": False}}, torch.float32),
    "all-reduced bf16": ({"bf16": {"enabled": True}, "zero": {"reduce_scatter": False}}, torch.bfloat16),
    "summed": ({"gradient_allreduce_op": "sum"}, torch.float32),
}


def _sent(rank: int, world_size: int, stage: int) -> dict[str, tuple[dict[str, Tensor], set[torch.dtype]]]:
    results = {}
    for name, (settings, _) in SENT.items():
        settings = {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}
        with sent_dtypes() as dtypes:
            results[name] = train(start(world_size, stage, **settings), rank, world_size), dtypes
    return results


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_travels_and_what_becomes_of_it(stage: int) -> None:
    first, second = run_on_ranks(2, _sent, stage)
    plain, exact = (train_plain("Plain", STEPS, dtype=dtype)[1] for dtype in (torch.float32, torch.float64))
    most = limit(4e-6, weight_distance(plain, exact))
    for name, (_, dtype) in SENT.items():
        weights, dtypes = first[name]
        assert dtypes <= {dtype}, name
        assert dtypes or dtype == torch.float32, name  # two ranks leave a sum in fp32 to gloo
        assert all(torch.equal(value, second[name][0][key]) for key, value in weights.items())
        if weights["head.weight"].dtype != torch.float32:
            continue
        distance = weight_distance(weights, plain)
        assert distance <= most or (dtype != torch.float32 and distance <= 0.05), name
    for lossless in ("bf16 as fp32", "all-reduced bf16"):
        assert weight_distance(first[lossless][0], first["bf16"][0]) == 0.0


def _norm(rank: int, world_size: int, op: str) -> float:
    engine = start(world_size, 2, gradient_allreduce_op=op)
    x, y = batches(1)[0]
    engine.backward(engine(x[:4], y[:4]))
    engine.step()
    return float(engine.get_global_grad_norm())


def test_sums_in_place_of_means() -> None:
    means, sums = run_on_ranks(2, _norm, "mean"), run_on_ranks(2, _norm, "sum")
    assert sums == [2 * mean for mean in means]


# ---- autocast ----


SMALL = 0.01  # of the loss: so that its gradients times 65536 fit into fp16


def plain_autocast(dtype: torch.dtype) -> dict[str, Tensor]:
    model = build("Plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    scale = 2.0**16 if dtype == torch.float16 else 1.0
    for x, y in batches(STEPS):
        with torch.autocast("cpu", dtype=dtype):
            loss = model(x, y)
        (loss.float() * SMALL * scale).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= scale
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


AUTOCAST: list[tuple[dict[str, Any], torch.dtype]] = [
    ({"torch_autocast": {"enabled": True}}, torch.bfloat16),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, torch.float16),
    ({"amp": {"enabled": True, "opt_level": "O1"}}, torch.float16),
    ({"amp": {"enabled": True, "opt_level": "O2", "loss_scale": 65536}}, torch.float16),
]


@pytest.mark.parametrize(("settings", "dtype"), AUTOCAST)
def test_autocast_is_torchs(settings: dict[str, Any], dtype: torch.dtype) -> None:
    with logged() as lines:
        engine = start(1, 3, **settings)
    weights = train(engine, 0, 1, SMALL)
    assert weight_distance(weights, plain_autocast(dtype)) <= 2e-6
    assert engine.optimizer.cur_scale == (65536.0 if dtype == torch.float16 else 1.0)
    notes = [line for line in lines if "Apex is retired" in line]
    assert len(notes) == ("amp" in settings)


def test_amp_o0_is_fp32() -> None:
    engine = start(1, 0, amp={"enabled": True, "opt_level": "O0"})
    assert weight_distance(train(engine, 0, 1), train_plain("Plain", STEPS)[1]) <= 2e-6


def _autocast(rank: int, world_size: int, stage: int) -> dict[str, Tensor]:
    return train(start(world_size, stage, torch_autocast={"enabled": True}), rank, world_size, SMALL)


def _autocast_of_bf16(rank: int, world_size: int, stage: int) -> tuple[torch.dtype, dict[str, Tensor]]:
    sections = {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}
    engine = start(world_size, stage, **sections)
    with torch.no_grad():
        loss = engine(*batches(1)[0])
    return loss.dtype, train(engine, rank, world_size, SMALL)


@pytest.mark.parametrize("stage", [1, 3])
def test_autocast_of_a_bf16_model_has_losses_in_fp32(stage: int) -> None:
    for dtype, weights in run_on_ranks(2, _autocast_of_bf16, stage):
        assert dtype == torch.float32
        assert weight_distance(weights, plain_autocast(torch.bfloat16)) <= 0.05


@pytest.mark.parametrize("stage", [1, 3])
def test_autocast_over_ranks(stage: int) -> None:
    for weights in run_on_ranks(2, _autocast, stage):
        assert weight_distance(weights, plain_autocast(torch.bfloat16)) <= 0.05  # bf16 rounds smaller batches otherwise


def test_modules_outside_of_the_list_compute_in_fp32() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Conv1d(1, 1, 1), nn.Linear(WIDTH, 1))
    dtypes = []
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]},
    }
    engine = launcher.initialize(model=model, config=config)[0]
    for module in engine.module:
        module.register_forward_hook(lambda _module, _args, output: dtypes.append(output.dtype))
    engine.backward(engine(torch.ones(4, 1, WIDTH)).float().mean())
    engine.step()
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]
    section: Any = config["torch_autocast"]
    section["lower_precision_safe_modules"] = ["torch.nn.Linear", "torch.nn.LSTM"]
    assert launcher.initialize(model=model, config=config)[0].module is model, "a class that no module has"
    section["lower_precision_safe_modules"] = ["torch.nn.Lstm"]
    with pytest.raises(EngineError, match=r"no class torch\.nn\.Lstm"):
        launcher.initialize(model=model, config=config)


# ---- the order of modules ----


def _paths(rank: int, world_size: int, warns: bool) -> list[str]:
    engine = start(world_size, 3, "AlternatingPath", zero={"log_trace_cache_warnings": warns})
    with logged() as lines:
        train(engine, rank, world_size, num_steps=3)
    return lines


def test_a_changed_path_is_reported_where_asked() -> None:
    said = [f"step {n}: the model used its modules in another order" for n in (2, 3)]
    first, second = run_on_ranks(2, _paths, True)
    assert [line.split(" than")[0] for line in first] == said
    assert second == run_on_ranks(2, _paths, False)[0] == []


@pytest.fixture
def operations() -> Iterator[list[Any]]:
    """What has a switch of its own in this torch, from matrix products on; the process is as before afterwards."""
    backends = torch.backends
    allowed = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    named = ((backends.cudnn, "conv"), (backends.cudnn, "rnn"), (backends.mkldnn, "matmul"))
    found = [backends.cuda.matmul, *(getattr(owner, name, None) for owner, name in named), backends]
    found = [each for each in found if hasattr(each, "fp32_precision")]
    before = [each.fp32_precision for each in found]
    yield found
    torch.set_float32_matmul_precision(allowed[0])
    backends.cudnn.allow_tf32 = allowed[1]
    for each, precision in zip(found, before, strict=True):
        each.fp32_precision = precision


@pytest.mark.parametrize("of_transformers", [None, "tf32", "ieee"])
def test_tf32_is_a_switch_of_the_process(of_transformers: str | None, operations: list[Any]) -> None:
    """Whatever was set before: `TrainingArguments(tf32=...)` sets the new switch of all operations."""
    if of_transformers and torch.backends in operations:
        torch.backends.fp32_precision = of_transformers  # type: ignore[attr-defined]
    for allowed, product, precision in ((True, "high", "tf32"), (False, "highest", "ieee"), (None, "highest", "ieee")):
        set_tf32(allowed)
        assert torch.get_float32_matmul_precision() == product
        assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == (precision == "tf32")
        assert [each.fp32_precision for each in operations[:3]] == [precision] * len(operations[:3])
