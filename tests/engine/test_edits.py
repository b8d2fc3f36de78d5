"""Weights that a script writes between steps count on every rank; a write that would be lost is an error."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch
from harness.train import zoo
from harness.train.behind import runs_behind_host
from harness.train.parity import weight_distance
from harness.train.ranks import run_on_ranks
from harness.train.zoo import batches, build
from torch import Tensor, nn

import launcher
from launcher.base.errors import EngineError
from launcher.zero.gathered import GatheredParameters

STEPS, LIMIT = 5, 0.2
engine_of = functools.partial(zoo.engine_of, optimizer={"type": "SGD", "params": {"lr": 0.1}})


def _clamp(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.clamp_(-LIMIT, LIMIT)


def _train_clamped(rank: int, world_size: int, stage: int, precision: str) -> dict[str, Tensor]:
    engine = engine_of(build("Plain"), stage, world_size, bf16={"enabled": precision == "bf16"})
    dtype = next(engine.module.parameters()).dtype
    for x, y in batches(STEPS):
        engine.backward(engine(x.chunk(world_size)[rank].to(dtype), y.chunk(world_size)[rank].to(dtype)))
        engine.step()
        with GatheredParameters(engine.module.parameters(), modifier_rank=0 if stage == 3 else None):
            _clamp(engine.module)
    return engine.state_dict()


def _train_with_a_list(
    rank: int, world_size: int, stage: int, precision: str, device: str, folder: str
) -> dict[str, Tensor]:
    """Clamp through a list of parameters that was made before the first step."""
    zero = {"stage": stage}
    if device != "none":
        zero["offload_optimizer"] = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
    engine = engine_of(build("Plain"), stage, world_size, bf16={"enabled": precision == "bf16"}, zero_optimization=zero)
    params = list(engine.module.parameters())
    dtype = params[0].dtype
    for x, y in batches(STEPS):
        engine.backward(engine(x.chunk(world_size)[rank].to(dtype), y.chunk(world_size)[rank].to(dtype)))
        engine.step()
        engine.synchronize_parameters()
        with torch.no_grad():
            torch._foreach_clamp_min_(params, -LIMIT)
            for param in params:
                param.clamp_(max=LIMIT)
    return {name: launcher.zero.safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}


@pytest.mark.parametrize(
    ("stage", "precision", "device"),
    [(0, "bf16", "none"), (1, "fp32", "cpu"), (2, "bf16", "cpu"), (2, "fp32", "nvme"), (1, "bf16", "none")],
)
def test_writes_through_a_list_from_before_the_step_count(
    tmp_path: Path, stage: int, precision: str, device: str
) -> None:
    expected = _clamped_in_a_plain_loop()
    for masters in run_on_ranks(2, _train_with_a_list, stage, precision, device, str(tmp_path)):
        assert weight_distance(masters, expected) <= (1e-5 if precision == "fp32" else 2e-2)
        if precision == "bf16":
            assert max(value.abs().max().item() for value in masters.values()) == pytest.approx(LIMIT, rel=0.02)


def _taken_by_the_kernel(rank: int, world_size: int, stage: int) -> tuple[int, list[float]]:
    """Write through `data`, which autograd does not count, with a kernel that takes edits over: how often it does."""
    masters: list[int] = []

    def take(master: Tensor, values: Tensor) -> bool:
        masters.append(master.numel())
        assert values.dtype == torch.bfloat16
        is_edited = values != master.bfloat16()
        master[is_edited] = values[is_edited].float()
        return True

    engine = engine_of(build("Plain"), stage, world_size, bf16={"enabled": True})
    (x, y), *_ = batches(1)
    with mock.patch("launcher.zero.tensors.take_edits", take):
        for _ in range(2):
            engine.backward(engine(x.chunk(world_size)[rank].bfloat16(), y.chunk(world_size)[rank].bfloat16()))
            engine.step()
            _clamp(engine.module)
        engine.backward(engine(x.chunk(world_size)[rank].bfloat16(), y.chunk(world_size)[rank].bfloat16()))
        with mock.patch.object(torch, "where", side_effect=AssertionError):
            engine._sharded.units[0].sync_external_writes()
    largest = [unit.params.master.abs().max().item() for unit in engine._sharded.units]
    return sum(masters), largest


def test_a_kernel_takes_edits_over_where_there_is_one() -> None:
    for num_taken, largest in run_on_ranks(2, _taken_by_the_kernel, 1):
        assert num_taken > 0
        assert max(largest) == pytest.approx(LIMIT, rel=0.02)


class _Sliced(nn.Module):
    """Parameters that are views of one tensor: autograd counts writes into them together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.weights = nn.ParameterList(nn.Parameter(part) for part in torch.randn(3, 16, 16) / 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return (x.mean(-1) - y).pow(2).mean()


def _train_slices(rank: int, world_size: int, stage: int, precision: str) -> None:
    """Take steps, which are no writes of the script, in units of a parameter each."""
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 256}
    engine = engine_of(_Sliced(), stage, world_size, bf16={"enabled": precision == "bf16"}, zero_optimization=zero)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for x, y in batches(3):
        engine.backward(engine(x.to(dtype), y.to(dtype)))
        engine.step()
    assert engine.global_steps == 3


@pytest.mark.parametrize(("stage", "precision"), [(2, "bf16"), (3, "fp32")])
def test_parameters_that_are_views_of_one_tensor_train(stage: int, precision: str) -> None:
    run_on_ranks(2, _train_slices, stage, precision)


def _write_what_is_on_its_way(rank: int, world_size: int, stage: int, is_written: bool) -> None:
    """Write through a list from before the step where nothing has waited for other ranks' updates; load after that."""
    engine = engine_of(build("Plain"), stage, world_size)
    weight = engine.module.blocks[1].up.weight
    x, y = batches(1)[0]
    state = engine.state_dict()
    for is_last in (False, True):
        engine.backward(engine(x, y))
        if is_written and is_last:
            with pytest.raises(
                EngineError, match=r"blocks\.1\.up\.weight was written before the updates of other ranks"
            ):
                engine.step()
            engine.load_state_dict(state)
        engine.step()
        if is_written and not is_last:
            with torch.no_grad():
                weight.clamp_(-LIMIT, LIMIT)
    assert engine.global_steps == 2


@pytest.mark.parametrize(("stage", "is_written"), [(1, True), (2, True), (2, False)])
def test_a_write_into_what_is_on_its_way_is_an_error(stage: int, is_written: bool) -> None:
    run_on_ranks(2, _write_what_is_on_its_way, stage, is_written)


def _clamped_in_a_plain_loop() -> dict[str, Tensor]:
    model = build("Plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
        _clamp(model)
    return dict(model.state_dict())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clamped_weights_stay_clamped(stage: int, precision: str) -> None:
    one, other = run_on_ranks(2, _train_clamped, stage, precision)
    assert all(torch.equal(one[name], value) for name, value in other.items())
    distance = weight_distance({name: value.float() for name, value in one.items()}, _clamped_in_a_plain_loop())
    assert distance <= (1e-5 if precision == "fp32" else 2e-2)
    if precision == "bf16":  # not clamped, they would be this far away
        assert max(value.abs().max().item() for value in one.values()) == pytest.approx(LIMIT, rel=0.02)


def _write_into_a_shard(rank: int, world_size: int) -> None:
    engine = engine_of(build("Plain"), 3, world_size)
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    with torch.no_grad():
        engine.module.blocks[1].up.weight.mul_(0.5)
    with pytest.raises(EngineError, match=r"blocks\.1\.up\.weight was written in place while it was sharded"):
        engine.step()


def test_a_write_into_a_shard_is_an_error() -> None:
    run_on_ranks(2, _write_into_a_shard)


def _set_parts_under_a_graph(rank: int, world_size: int) -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    engine = engine_of(build("Plain"), 3, world_size, zero_optimization={**zero, "stage3_prefetch_bucket_size": 0})
    weight = engine.module.blocks[1].up.weight
    x, y = batches(1)[0]
    early = engine(x, y)
    part = launcher.zero.safe_get_local_fp32_param(weight)
    launcher.zero.safe_set_local_fp32_param(weight, torch.zeros_like(part))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(early)
    engine.backward(engine(x, y))
    engine.step()


def test_a_graph_from_before_parts_were_set_is_an_error() -> None:
    run_on_ranks(2, _set_parts_under_a_graph)


class _Own(nn.Parameter):
    """A class of parameters that a script has."""


def _write_into_data(rank: int, world_size: int) -> Tensor:
    """Write into the `data` of shards in the ways of scripts; each is refused, and leaves all as it was."""
    model = build("Plain")
    model.blocks[0].up.weight = _Own(model.blocks[0].up.weight.detach())
    engine = engine_of(model, 3, world_size)
    params = list(engine.module.parameters())
    weight = engine.module.blocks[1].up.weight
    for _ in range(2):  # of shards that have never been unsharded, and that have been
        for write in (
            lambda: _clamp(engine.module),
            lambda: params[0].data.__setitem__(slice(None), 0.0),
            lambda: torch._foreach_mul_([param.data for param in params], 0.5),
            lambda: nn.init.zeros_(weight.data),
            lambda: weight.data.sub_(1.0),
            lambda: torch.mul(weight.data, 0.5, out=weight.data),
            lambda: operator.iand(weight.data, 0),
            lambda: setattr(weight, "data", weight.data.clamp(-LIMIT, LIMIT)),
            lambda: nn.utils.vector_to_parameters(torch.zeros(10**6), params),
            lambda: copy.deepcopy(params),
        ):
            with pytest.raises(EngineError, match=r"is a shard, which has no elements"):
                write()
        with pytest.raises(
            EngineError, match=r"param\.data was written by mul_\(\), where blocks\.1\.up\.weight is a shard"
        ):
            weight.data.mul_(0.5)
        assert isinstance(weight, nn.Parameter)
        assert (weight.data.dtype, weight.data.shape) == (torch.float32, (0,))
        assert type(weight.data.clone()) is type(pickle.loads(pickle.dumps(weight.data))) is Tensor
        engine.module.to("cpu").float()
        x, y = batches(1)[0]
        engine.backward(engine(x, y))
        engine.step()
    with GatheredParameters(params, modifier_rank=0):
        _clamp(engine.module)
    engine.destroy()
    again = engine_of(engine.module, 3, world_size)
    with pytest.raises(EngineError, match="is a shard"):
        _clamp(again.module)
    with pytest.raises(EngineError, match="is a shard"):
        again.module.blocks[0].up.weight.data.zero_()
    with GatheredParameters(params):
        assert type(weight) is nn.Parameter
        assert type(again.module.blocks[0].up.weight) is _Own
        return weight.detach().clone()


def test_a_write_into_the_data_of_a_shard_is_an_error() -> None:
    model = build("Plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(*batches(1)[0]).backward()
        optimizer.step()
    _clamp(model)
    for found in run_on_ranks(2, _write_into_data):
        torch.testing.assert_close(found, model.blocks[1].up.weight.detach())


def _write_into_a_shard_of_one_rank(rank: int, world_size: int, is_behind: bool) -> Tensor:
    """Write on rank 1, catch the error on every rank, and train on: `step` reports it once."""
    with runs_behind_host() if is_behind else contextlib.nullcontext():
        engine = engine_of(build("Plain"), 3, world_size)
        x, y = batches(1)[0]
        engine.backward(engine(x, y))
        if rank == 1:
            with torch.no_grad():
                engine.module.blocks[1].up.weight.mul_(0.5)
        with pytest.raises(EngineError, match=r"^rank 1: .*blocks\.1\.up\.weight was written in place while it was"):
            engine.step()
        assert engine.global_steps == 0
        engine.step()
        assert engine.global_steps == 1
        return engine.state_dict()["blocks.1.up.weight"]


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_write_into_a_shard_of_one_rank_is_an_error_on_every_rank(is_behind: bool) -> None:
    one, other = run_on_ranks(2, _write_into_a_shard_of_one_rank, is_behind)
    assert torch.equal(one, other)
    assert not torch.equal(one, build("Plain").state_dict()["blocks.1.up.weight"])


def _shorten_rows(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 1))
    with pytest.raises(EngineError, match=r"the module 0 has max_norm=1\.0"):
        engine_of(model, 0, world_size)


def test_weights_that_change_in_forward_are_refused() -> None:
    run_on_ranks(2, _shorten_rows)


def _give_other_memory(rank: int, world_size: int, stage: int) -> None:
    engine = engine_of(build("Plain"), stage, world_size)
    x, y = batches(1)[0]
    engine.backward(engine(x, y))
    weight = engine.module.blocks[1].up.weight
    if stage == 3:
        with pytest.raises(EngineError, match=r"param\.data was set, where blocks\.1\.up\.weight is a shard"):
            weight.data = torch.zeros(32, 16)
    else:
        weight.data = torch.zeros_like(weight.data)
        with pytest.raises(EngineError, match=r"blocks\.1\.up\.weight was given other memory"):
            engine.step()
    with pytest.raises(EngineError, match="the parameter weight was added or replaced after initialize"):
        engine.module.blocks[2].up.weight = nn.Parameter(torch.zeros(32, 16))
    with pytest.raises(EngineError, match="the parameter extra was added or replaced after initialize"):
        engine.module.blocks[2].up.extra = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize("stage", [1, 3])
def test_other_memory_and_other_parameters_are_errors(stage: int) -> None:
    run_on_ranks(2, _give_other_memory, stage)


def _edit_on_one_rank(rank: int, world_size: int, stage: int, precision: str, how: str, is_behind: bool) -> str | None:
    """Return what the step after the edit says, or the backward after it where the host runs ahead of the device."""
    with runs_behind_host() if is_behind else contextlib.nullcontext():
        engine = engine_of(build("Plain"), stage, world_size, bf16={"enabled": precision == "bf16"})
        mine = list(engine.module.parameters())
        dtype = mine[0].dtype
        x, y = (tensor.chunk(world_size)[rank].to(dtype) for tensor in batches(1)[0])
        for number in range(3):
            with pytest.raises(EngineError) if number == 2 and how != "reads" else contextlib.nullcontext() as error:
                engine.backward(engine(x, y))
                if number == 1 and rank == 1:
                    with torch.no_grad():
                        if how == "data":
                            next(engine.module.blocks[3].parameters()).data.mul_(0.5)
                        elif how == "earlier list":
                            mine[-1].mul_(0.5)
                        elif how == "load":
                            engine.module.load_state_dict(build("Repeated").state_dict())
                        else:
                            assert all(param.norm() >= 0 for param in engine.module.parameters())
                if number == 1 and how != "reads" and not is_behind:
                    with pytest.raises(EngineError) as error:
                        engine.step()
                    return str(error.value)
                engine.step()
        engine.destroy()
        return None if how == "reads" else str(error.value)


@pytest.mark.parametrize(
    ("stage", "precision", "how", "is_behind"),
    [
        (0, "fp32", "data", False),
        (0, "fp32", "earlier list", False),
        (0, "bf16", "load", False),
        (1, "fp32", "load", False),
        (2, "bf16", "data", False),
        (2, "fp32", "earlier list", True),
        (0, "bf16", "data", True),
        (0, "fp32", "reads", False),
        (2, "bf16", "reads", True),
    ],
)
def test_weights_written_on_one_rank_alone_are_an_error_on_every_rank(
    stage: int, precision: str, how: str, is_behind: bool
) -> None:
    for said in run_on_ranks(2, _edit_on_one_rank, stage, precision, how, is_behind):
        assert (said is None) == (how == "reads")
        assert said is None or "are not the same on every rank: some were written on one rank alone" in said


class _Adapted(nn.Module):
    """A frozen base in 16 bits, and adapters in fp32 that train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.base = nn.ModuleList(nn.Linear(16, 16).bfloat16().requires_grad_(False) for _ in range(3))
        self.adapters = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for base, adapter in zip(self.base, self.adapters, strict=True):
            x = torch.tanh(base(x.bfloat16()).float() + adapter(x))
        return (x.mean(-1) - y).pow(2).mean()


def _train_adapters(rank: int, world_size: int, stage: int) -> dict[str, Tensor]:
    engine = engine_of(_Adapted(), stage, world_size)
    for x, y in batches(STEPS):
        engine.backward(engine(x.chunk(world_size)[rank], y.chunk(world_size)[rank]))
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_frozen_base_keeps_its_type(stage: int) -> None:
    model = _Adapted()
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
    for weights in run_on_ranks(2, _train_adapters, stage):
        assert all(weights[name].dtype == value.dtype for name, value in model.state_dict().items())
        assert weight_distance(weights, dict(model.state_dict())) <= 1e-5


def _train_doubles(rank: int, world_size: int) -> None:
    with pytest.raises(EngineError, match=r"blocks\.0\.scale is float64, and the engine trains in fp32 or 16 bits"):
        engine_of(build("Plain").double(), 2, world_size)


def test_a_float64_model_is_refused() -> None:
    run_on_ranks(2, _train_doubles)
