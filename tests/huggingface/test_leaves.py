"""Mixtures of experts of transformers are leaf modules at stage 3, as in DeepSpeed, and train as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.train.mixtures import build
from harness.train.ranks import run_on_ranks

import launcher
from launcher.zero import get_z3_leaf_modules

STEPS = 2


def _train(rank: int, world_size: int, family: str, leaves: dict[str, Any]) -> tuple[list[str], list[float]]:
    model = build(family)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0, "leaf_module": leaves}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine = launcher.initialize(model=model, config=config)[0]
    losses = []
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        tokens = torch.randint(1, 32, (1, 8))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    found = sorted({type(module).__name__ for module in get_z3_leaf_modules(engine.module) if module._z3_leaf})
    engine.destroy()
    return found, losses


@pytest.mark.parametrize(
    ("family", "name"), [("mixtral", "MixtralSparseMoeBlock"), ("qwen3_moe", "Qwen3MoeSparseMoeBlock")]
)
def test_mixtures_are_leaves_unless_others_are_named(family: str, name: str) -> None:
    (found, losses), _ = run_on_ranks(2, _train, family, {})
    (others, expected), _ = run_on_ranks(2, _train, family, {"classes": []})
    assert (found, others) == ([name], [])
    assert losses == pytest.approx(expected, rel=1e-5)
