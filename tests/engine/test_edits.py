"""Weights that are written by hand between steps count on every rank; where a write would be lost, it is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.parity import weight_distance
from harness.ranks import run_on_ranks
from harness.zoo import SAMPLES, batches, build
from torch import Tensor, nn

import launcher
from launcher.base.errors import EngineError
from launcher.zero.gathered import GatheredParameters

STEPS, LIMIT = 5, 0.2


def engine_of(model: nn.Module, stage: int, world_size: int, **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "gradient_clipping": 0.0,
        "steps_per_print": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **more,
    }
    return launcher.initialize(model=model, config=config)[0]


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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clamped_weights_stay_clamped(stage: int, precision: str) -> None:
    model = build("Plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()
        _clamp(model)
    one, other = run_on_ranks(2, _train_clamped, stage, precision)
    assert all(torch.equal(one[name], value) for name, value in other.items())
    distance = weight_distance({name: value.float() for name, value in one.items()}, dict(model.state_dict()))
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


def _shorten_rows(rank: int, world_size: int) -> None:
    model = nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 1))
    with pytest.raises(EngineError, match=r"the module 0 has max_norm=1\.0"):
        engine_of(model, 0, world_size)


def test_weights_that_change_in_forward_are_refused() -> None:
    run_on_ranks(2, _shorten_rows)
