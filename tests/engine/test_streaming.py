"""Nothing holds the whole model on the device: not `initialize`, not state dicts, not the end of an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import launcher
from launcher.base.errors import EngineError
from launcher.comm.communicator import Communicator
from launcher.zero import GatheredParameters, Init

WIDTH, NUM_BLOCKS, WORLD_SIZE = 64, 8, 2
BLOCK_NUMEL = 2 * WIDTH * (WIDTH + 1)
UNIT_BYTES = 2 * BLOCK_NUMEL  # in bf16, in which everything of the engine's is here


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
            self.register_buffer("offset", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x + self.offset).float().square().mean()


def config(stage: int = 3, *, bf16: bool = True, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }


class _Device(TorchDispatchMode):
    """A double of a device's memory: counts the bf16 storages that operators have made, and that are alive.

    Models are built in fp32, so these are what `initialize` brings to the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, StorageWeakRef] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.bfloat16:
                reference = StorageWeakRef(tensor.untyped_storage())
                self._made[reference.cdata] = reference
        self.peak_bytes = max(self.peak_bytes, self._alive_bytes())
        return out

    def _alive_bytes(self) -> int:
        total = 0
        for address, reference in list(self._made.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # type: ignore[attr-defined]
            if storage is None:
                del self._made[address]
            else:
                total += storage.nbytes()
        return total


def _initialize(rank: int, world_size: int, init: bool, offload: dict[str, Any]) -> dict[str, Any]:
    """Build an engine over a model of fp32 parameters; watch its device and the memory of the parameters."""
    given = config(stage3_max_reuse_distance=0, **offload)
    with Init() if init else contextlib.nullcontext():
        model = Model(seed=rank)
    before = [StorageWeakRef(param.untyped_storage()) for param in model.parameters()]
    sent: list[tuple[int, int]] = []  # of each broadcast: elements, and parameters that had their own memory still

    def broadcast(communicator: Communicator, tensors: list[Tensor], source: int = 0) -> None:
        sent.append((sum(tensor.numel() for tensor in tensors), sum(not one.expired() for one in before)))
        communicator_broadcast(communicator, tensors, source)

    communicator_broadcast = Communicator.broadcast
    with mock.patch.object(Communicator, "broadcast", broadcast), _Device() as device:
        engine = launcher.initialize(model=model, config=given)[0]
    num_shards = 2 if offload else 1  # in host memory a 16-bit copy stands beside the master
    shards = num_shards * NUM_BLOCKS * UNIT_BYTES // world_size
    buffers = engine._parts.group.buffers
    return {
        "units on the device": (device.peak_bytes - shards) / UNIT_BYTES,
        "units lent": buffers.peak_bytes / UNIT_BYTES,
        "sent": sent,
        "first": engine.state_dict()["blocks.0.first.weight"],
    }


@pytest.mark.parametrize("init", [False, True])
@pytest.mark.parametrize("offload", [{}, {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}])
def test_initialize_brings_one_unit_after_another_to_the_device(init: bool, offload: dict[str, Any]) -> None:
    for found in run_on_ranks(WORLD_SIZE, _initialize, init, offload):
        assert found["units on the device"] <= 2.1  # and one row
        assert found["units lent"] <= (3.1 if init else 1.1)  # shards of `zero.Init` are fp32, twice as large, here
        assert torch.equal(found["first"], Model(seed=0).blocks[0].first.weight.bfloat16()), "rank 0's values"
        units = [sent for sent in found["sent"] if sent[0] >= BLOCK_NUMEL]
        if init:
            assert units == [], "every rank has the values of rank 0"
        else:
            assert [numel for numel, _ in units] == [BLOCK_NUMEL] * NUM_BLOCKS, "one broadcast a unit"
            num_left = [left for _, left in units]
            assert num_left == [4 * (NUM_BLOCKS - 1 - index) for index in range(NUM_BLOCKS)], "their memory is freed"


def _peaks(rank: int, world_size: int) -> dict[str, float]:
    """Return the most memory lent at once, in units, during each thing that an engine does to a whole model."""
    engine = launcher.initialize(model=Model(), config=config())[0]
    engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)))
    engine.step()
    buffers, found = engine._parts.group.buffers, {}

    def measured(name: str, action: Callable[[], Any]) -> Any:
        buffers.peak_bytes = buffers.lent_bytes = 0
        result = action()
        found[name] = buffers.peak_bytes / UNIT_BYTES
        assert buffers.lent_bytes == 0
        return result

    state = measured("state_dict", engine.state_dict)
    measured("state_dict of rank 0", lambda: engine.state_dict(rank0_only=True))
    measured("load_state_dict", lambda: engine.load_state_dict(state))
    measured("destroy", engine.destroy)
    again = launcher.initialize(model=engine.module, config=config())[0]
    found["shards of an ended engine"] = again._parts.group.buffers.peak_bytes / UNIT_BYTES
    after = again.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in state.items())
    return found


def test_a_unit_or_two_are_whole_at_once() -> None:
    for found in run_on_ranks(WORLD_SIZE, _peaks):
        most = {"destroy": 0.0, "shards of an ended engine": 1.01}  # which lend from their own engine's pool
        assert found.keys() > most.keys()
        for what, units in found.items():
            assert units <= most.get(what, 1.01), what


# ---- what a state dict is ----


def _of_rank_0(rank: int, world_size: int) -> dict[str, Any]:
    with Init():
        model = Model()
    engine = launcher.initialize(model=model, config=config(bf16=False))[0]
    everywhere, of_rank_0 = engine.state_dict(), engine.state_dict(rank0_only=True)
    assert all(param.numel() == 0 for param in model.parameters()), "sharded again"
    for state in (everywhere, of_rank_0):
        assert all(value.device.type == "cpu" and type(value) is Tensor for value in state.values())
        assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(state)
    storages = {param.untyped_storage().data_ptr() for param in model.parameters()}
    assert not storages & {value.untyped_storage().data_ptr() for value in everywhere.values()}
    assert model.offset.data_ptr() != everywhere["offset"].data_ptr()
    return {"everywhere": everywhere, "of rank 0": of_rank_0}


def test_rank_0_alone_may_hold_the_state_dict() -> None:
    first, second = run_on_ranks(WORLD_SIZE, _of_rank_0)
    model = Model().state_dict()
    for state in (first["everywhere"], first["of rank 0"], second["everywhere"]):
        assert list(state) == list(model)
        assert all(torch.equal(value, model[name]) for name, value in state.items())
    assert second["of rank 0"] == {}


class Tied(nn.Module):
    """What state dicts can have in them: tied weights, buffers that are not saved, hooks, versions, extra state."""

    def __init__(self, is_hooked: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.blocks[1].register_state_dict_post_hook(_add_norm)
        self.blocks[2].register_load_state_dict_post_hook(_double_bias)
        if is_hooked:  # then everything is whole while it loads
            self.register_load_state_dict_pre_hook(_drop_prefix)

    def get_extra_state(self) -> dict[str, int]:
        return {"answer": 42}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.answer = state["answer"]


def _add_norm(module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    state[f"{prefix}norm"] = module.weight.detach().norm()


def _double_bias(module: Any, _keys: Any) -> None:
    with torch.no_grad():
        module.bias.mul_(2)


def _drop_prefix(module: Any, state: dict[str, Any], *_others: Any) -> None:
    assert module.blocks[0].weight.numel() == 256, "hooks see what is inside"
    for name in [name for name in state if name.startswith("old.")]:
        state[name.removeprefix("old.")] = state.pop(name)


def _tied(is_hooked: bool) -> Tied:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Tied(is_hooked)


def _said(load: Callable[..., Any], state: dict[str, Any], strict: bool) -> Any:
    try:
        return tuple(load(state, strict=strict))
    except RuntimeError as error:
        return str(error)


def _states(is_hooked: bool) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield state dicts that fit and that do not, and how strictly to load them."""
    before = _tied(is_hooked).state_dict()
    full = {name: value + 1 if isinstance(value, Tensor) else value for name, value in before.items()}
    del full["blocks.1.norm"]
    yield full, True
    if is_hooked:
        yield {f"old.{name}": value for name, value in full.items()}, True
    some = {name: value for name, value in full.items() if not name.startswith("blocks.0")} | {"more": torch.ones(1)}
    yield some, True
    yield some, False
    yield full | {"blocks.0.weight": torch.ones(2, 2)}, True
    yield full | {"blocks.0.weight": torch.ones(2, 2)}, False
    yield {}, False


def _loads(rank: int, world_size: int, stage: int, is_hooked: bool) -> list[tuple[Any, dict[str, Any]]]:
    found = []
    for state, strict in _states(is_hooked):
        engine = launcher.initialize(model=_tied(is_hooked), config=config(stage, bf16=False))[0]
        said = _said(engine.load_state_dict, state, strict)
        after = engine.state_dict(prefix="model.")
        assert after["model.head.weight"].data_ptr() == after["model.embedding.weight"].data_ptr()
        assert after._metadata["model.norm"] == {"version": 2}  # type: ignore[attr-defined]
        masters = {
            name: launcher.zero.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()
        }
        assert all(torch.equal(value, after[f"model.{name}"]) for name, value in masters.items() if value is not None)
        found.append((said, after))
        with pytest.raises(EngineError, match="leave assign out"):
            engine.load_state_dict(state, assign=True)
    return found


@pytest.mark.parametrize(("stage", "is_hooked"), [(0, True), (2, False), (3, True), (3, False)])
def test_state_dicts_are_as_torchs(stage: int, is_hooked: bool) -> None:
    expected = []
    for state, strict in _states(is_hooked):
        model = _tied(is_hooked)
        said = _said(model.load_state_dict, state, strict)
        expected.append((said, model.state_dict(prefix="model.")))
    for found in run_on_ranks(WORLD_SIZE, _loads, stage, is_hooked):
        for (said, after), (torch_said, torch_after) in zip(found, expected, strict=True):
            assert said == torch_said
            assert list(after) == list(torch_after)
            for name, value in after.items():
                assert torch.equal(value, torch_after[name]) if isinstance(value, Tensor) else value == {"answer": 42}


class OwnLoad(Model):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        for name, param in self.named_parameters():
            param.data.copy_(state_dict[name])
        return "own"


def _own_load(rank: int, world_size: int) -> tuple[Any, dict[str, Tensor]]:
    engine = launcher.initialize(model=OwnLoad(), config=config(bf16=False))[0]
    return engine.load_state_dict(Model(seed=1).state_dict()), engine.state_dict()


def test_a_model_that_loads_by_itself() -> None:
    expected = dict(Model(seed=1).named_parameters())
    for said, state in run_on_ranks(WORLD_SIZE, _own_load):
        assert said == "own"
        assert all(torch.equal(state[name], value) for name, value in expected.items())


# ---- from one engine to the next ----

SMALL = {"stage3_max_live_parameters": WIDTH * (WIDTH + 1)}  # a unit is a layer; without it, a block


def _in_turns(rank: int, world_size: int, kinds: list[dict[str, Any]]) -> dict[str, Tensor]:
    model = Model()
    for kind in kinds:
        engine = launcher.initialize(model=model, config=config(bf16=False, **kind))[0]
        engine.eval()(torch.ones(1, WIDTH))
    with GatheredParameters(model.parameters()):
        assert all(param.numel() for param in model.parameters())
    return engine.state_dict()


@pytest.mark.parametrize(
    "kinds",
    [[{}, SMALL, {}], [{}, {"stage": 1}], [{}, SMALL, {"stage3_param_persistence_threshold": 1000}, {"stage": 2}]],
)
def test_engines_that_divide_a_model_otherwise_follow_each_other(kinds: list[dict[str, Any]]) -> None:
    expected = Model().state_dict()
    for state in run_on_ranks(WORLD_SIZE, _in_turns, kinds):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


class Moved(Model):
    """A model that moves more than parameters and buffers, and that has a parameter of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(WIDTH)  # no buffer
        self.count = nn.Parameter(torch.arange(3), requires_grad=False)
        self.recurrent = nn.GRU(WIDTH, WIDTH)
        self.seen: list[int] = []

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.table = fn(self.table)
        self.seen.append(max(param.numel() for param in self.blocks.parameters()))
        return super()._apply(fn, recurse)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.recurrent(x + self.table)[0])


def _moved(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    model = Moved()
    with torch.no_grad():
        model.count.add_(rank)
    engine = launcher.initialize(model=model, config=config(stage))[0]
    engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)))
    engine.step()
    return {"table": model.table.dtype, "seen": model.seen, "count": model.count.tolist()}


@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_model_moves_besides_goes_to_the_device(stage: int) -> None:
    for found in run_on_ranks(WORLD_SIZE, _moved, stage):
        assert found["table"] == torch.bfloat16
        assert found["seen"] == [0], "no parameter was moved with it"
        assert found["count"] == [0, 1, 2], "rank 0's values"


@pytest.mark.parametrize("what", ["blocks.1.first.weight", "offset"])
def test_a_model_without_values_is_refused(what: str) -> None:
    model = Model()
    if "." in what:
        model.blocks[1].to("meta")
    else:
        model.offset = model.offset.to("meta")
    with pytest.raises(EngineError, match=what):
        launcher.initialize(model=model, config=config())
