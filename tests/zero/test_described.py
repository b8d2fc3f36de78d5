"""What scripts for DeepSpeed read, call and write on parameters: `ds_*`, `all_gather()`, `partition()`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness.train.ranks import run_on_ranks
from harness.train.zoo import batches, build, engine_of
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.zero import GatheredParameters, Init, ZeroParamStatus


def _states(rank: int, world_size: int) -> None:
    with Init():
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    weight, bias = model[0].weight, model[0].bias
    numel = math.ceil(15 / world_size)
    assert (weight.ds_shape, weight.ds_numel, weight.numel()) == ((5, 3), 15, 0)
    assert weight.ds_tensor.numel() == weight.partition_numel() == numel
    assert len({param.ds_id for param in model.parameters()}) == 4
    assert not weight.ds_persist
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    summary = weight.ds_summary()
    assert (summary["id"], summary["status"], summary["numel"]) == (weight.ds_id, "NOT_AVAILABLE", 0)
    assert (summary["ds_shape"], summary["ds_tensor.shape"], summary["grad_shape"]) == ((5, 3), (numel,), None)
    gathering = weight.all_gather([weight, bias], async_op=True)
    assert weight.ds_status is bias.ds_status is ZeroParamStatus.INFLIGHT
    gathering.wait()
    assert weight.ds_status is ZeroParamStatus.AVAILABLE
    assert (weight.shape, bias.shape) == ((5, 3), (5,))
    with torch.no_grad():
        weight.fill_(2.0)
        bias.fill_(2.0)
    weight.partition(has_been_updated=True)
    bias.partition()
    assert weight.numel() == bias.numel() == 0
    assert (weight.ds_tensor[:1] == 2.0).all()
    with GatheredParameters([weight, bias]):
        assert (weight == 2.0).all()
        assert (bias != 2.0).any()  # what is not said to be updated is forgotten


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_in_three_states(world_size: int) -> None:
    run_on_ranks(world_size, _states)


def _train_built_alone(rank: int, world_size: int, stage: int) -> dict[str, Tensor]:
    torch.manual_seed(23)
    with Init():
        model = build("Plain")
    engine = engine_of(model, stage, world_size)
    for x, y in batches(2):
        engine(x, y).backward()
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_built_by_one_rank_trains(stage: int) -> None:
    engine = engine_of(build("Plain"), stage, 1)
    for x, y in batches(2):
        engine(x, y).backward()
        engine.step()
    [found] = run_on_ranks(1, _train_built_alone, stage)
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(found[name], value)


def _write_parts(rank: int, world_size: int, precision: str, how: str) -> None:
    sgd: dict[str, Any] = {"type": "SGD", "params": {"lr": 0.0}}
    engine = engine_of(build("Plain"), 3, world_size, bf16={"enabled": precision == "bf16"}, optimizer=sgd)
    weight = engine.module.blocks[0].up.weight
    if how == "data":
        weight.ds_tensor.data = torch.full_like(weight.ds_tensor.data, 3.0)
    elif how == "copy":
        weight.ds_tensor.copy_(torch.full_like(weight.ds_tensor, 3.0))
    else:
        weight.ds_tensor.data[:] = 3.0
    x, y = batches(1)[0]
    x, y = (tensor.chunk(world_size)[rank].to(weight.ds_tensor.dtype) for tensor in (x, y))
    for _ in range(2):  # what was written is there, and outlives a step
        assert (engine.state_dict()["blocks.0.up.weight"] == 3.0).all()
        engine.backward(engine(x, y))
        engine.step()


@pytest.mark.parametrize(("precision", "how"), [("fp32", "data"), ("bf16", "copy"), ("bf16", "data"), ("fp32", "item")])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_written_to_a_part_is_the_parameter(world_size: int, precision: str, how: str) -> None:
    run_on_ranks(world_size, _write_parts, precision, how)


def _refuse_writes(rank: int, world_size: int) -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 10**5}
    whole = engine_of(build("Plain"), 3, world_size, zero_optimization=zero).module.head.weight
    with pytest.raises(EngineError, match=r"ds_tensor of head\.weight was written, where the parameter stays whole"):
        whole.ds_tensor.zero_()
    weight = engine_of(build("Plain"), 3, world_size).module.blocks[0].up.weight
    with GatheredParameters(weight), pytest.raises(EngineError, match="where the parameter is whole now"):
        weight.ds_tensor.data = weight.ds_tensor * 2
    with pytest.raises(EngineError, match=r"elements on this rank, the value 1$"):
        weight.ds_tensor.data = torch.ones(1)


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(15.0).reshape(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _equal_parts(rank: int, world_size: int, precision: str) -> None:
    sgd: dict[str, Any] = {"type": "SGD", "params": {"lr": 0.5}}
    model = nn.Sequential(_Scale(), _Scale())
    engine = engine_of(model, 3, world_size, bf16={"enabled": precision == "bf16"}, optimizer=sgd)
    numel = math.ceil(15 / world_size)
    for scale in model:
        expected = nn.functional.pad(torch.arange(15.0), (0, numel * world_size - 15)).chunk(world_size)[rank]
        torch.testing.assert_close(scale.weight.ds_tensor.float(), expected)
    engine.backward(engine(torch.ones(3, 5, dtype=model[0].weight.dtype)).sum())
    assert {part.numel() for part in engine.optimizer.get_fp32_grad_partitions()[0].values()} == {numel}
    engine.step()
    assert (engine.state_dict()["0.weight"].float() == torch.arange(15.0).reshape(3, 5) * 0.5).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_parameter_alone_is_cut_into_equal_parts(world_size: int, precision: str) -> None:
    run_on_ranks(world_size, _equal_parts, precision)


def _status_of_the_last_layer(rank: int, world_size: int) -> list[bool]:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    model = nn.Sequential(_Scale(), _Scale())
    engine, found = engine_of(model, 3, world_size, zero_optimization=zero), []
    for _ in range(2):  # the second pass knows that backward begins with the last layer
        loss = engine(torch.ones(3, 5)).sum()
        found.append(model[1].weight.ds_status is ZeroParamStatus.NOT_AVAILABLE)
        engine.backward(loss)
        engine.step()
    return found


def test_a_reuse_distance_of_zero_keeps_nothing_unsharded() -> None:
    assert run_on_ranks(2, _status_of_the_last_layer) == [[True, True]] * 2


def test_writes_that_would_not_count_are_refused() -> None:
    run_on_ranks(2, _refuse_writes)
