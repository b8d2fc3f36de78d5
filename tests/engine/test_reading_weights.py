"""Whoever lists a model's parameters right after a step sees the finished update."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import launcher

WIDTH, NUM_LAYERS = 1024, 8  # 4 MiB a layer: their gathers take longer than the reading

READERS: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    "state_dict": lambda model: list(model.state_dict().values()),
    "state_dict of a part": lambda model: list(model[-1].state_dict().values()),  # type: ignore[index]
    "parameters": lambda model: list(model.parameters()),
    "named_parameters": lambda model: [param for _, param in model.named_parameters()],
    "deepcopy": lambda model: list(copy.deepcopy(model).parameters()),
    "parameters_to_vector": lambda model: [parameters_to_vector(model.parameters())],
}


def _differences(rank: int, world_size: int, stage: int) -> dict[str, float]:
    """Read after a step in every way, twice; return the largest differences from what is read later."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": WIDTH * WIDTH},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    engine = launcher.initialize(model=model, config=config)[0]
    found = dict.fromkeys(READERS, 0.0)
    for name in 2 * list(READERS):
        engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
        engine.step()
        read = [tensor.detach().clone() for tensor in READERS[name](model)]
        engine.synchronize_parameters()
        differences = [(a - b).abs().max().item() for a, b in zip(read, READERS[name](model), strict=True)]
        found[name] = max(found[name], *differences)
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_read_right_after_a_step_is_the_finished_update(stage: int) -> None:
    assert run_on_ranks(2, _differences, stage) == [dict.fromkeys(READERS, 0.0)] * 2
