"""What the planner says is what the engine keeps: real ranks, real buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.ranks import run_on_ranks
from torch import nn

from launcher.planner.memory import Precision, Setting, rank_memory
from launcher.planner.model import ModelFacts, Parameter

WIDTH, NUM_BLOCKS, WORLD_SIZE = 600, 8, 2


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)))


def facts() -> ModelFacts:
    params = tuple(Parameter(name, param.numel()) for name, param in build().named_parameters())
    return ModelFacts("blocks", "test", params)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_formula_is_what_the_engine_allocates(stage: int, precision: str, overlaps: bool) -> None:
    setting = Setting(stage, Precision.of(precision), overlaps=overlaps)
    planned = rank_memory(facts(), setting, WORLD_SIZE)
    for found in run_on_ranks(WORLD_SIZE, _measured, stage, precision, overlaps):
        assert planned.model_states <= found["model_states"] <= 1.02 * planned.model_states
        assert found["peak_gradient_buffers"] <= 1.02 * planned.in_flight
        if stage == 2 and not overlaps:
            assert found["peak_gradient_buffers"] >= 0.85 * planned.in_flight  # the rest is the gradient of autograd


def _measured(rank: int, world_size: int, stage: int, precision: str, overlaps: bool) -> dict[str, int]:
    """Return the bytes that live from step to step, and the most that units' own gradient buffers took at once."""
    import launcher
    from launcher.zero.unit import FlatUnit

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage, "overlap_comm": overlaps},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, optimizer, _, _ = launcher.initialize(model=build(), config=config)
    units = engine._parts.units
    peak = 0
    take = FlatUnit.take_gradient

    def watched(unit: FlatUnit, index: int) -> None:
        nonlocal peak
        take(unit, index)
        moving = [u._local_grad for u in units if not u._keeps_local_grad and u._local_grad is not None]
        peak = max(peak, sum(grad.nbytes for grad in moving))

    FlatUnit.take_gradient = watched  # type: ignore[method-assign]
    try:
        for _ in range(2):
            dtype = next(engine.module.parameters()).dtype
            engine.backward(engine(torch.ones(2, WIDTH, dtype=dtype)).float().mean())
            engine.step()
    finally:
        FlatUnit.take_gradient = take  # type: ignore[method-assign]
    tensors: list[Any] = []
    for unit in units:
        tensors += [value for value in vars(unit).values() if isinstance(value, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    states = sum(storages.values()) + 4 * optimizer.optimizer.state_numel()
    return {"model_states": states, "peak_gradient_buffers": peak}
