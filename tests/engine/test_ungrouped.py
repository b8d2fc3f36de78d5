"""Trainable parameters in no optimizer group: the others are trained as without them, and rank 0 names them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.logs import logged
from harness.train.ranks import run_on_ranks
from harness.train.zoo import LR, SAMPLES, WIDTH, build
from torch import Tensor

import launcher

STEPS = 3


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, generator=generator)


def _train(rank: int, world_size: int, stage: int, brings_optimizer: bool) -> tuple[dict[str, Tensor], list[str]]:
    x, y = (part.chunk(world_size)[rank] for part in batch())
    model = build("Plain")
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    given: dict[str, Any] = {"model_parameters": list(model.blocks.parameters())}
    if brings_optimizer:
        given["optimizer"] = torch.optim.AdamW(given.pop("model_parameters"), lr=LR)
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}}
    with logged() as lines:
        engine = launcher.initialize(model=model, config=config, **given)[0]
    for _ in range(STEPS):
        engine.backward(engine(x, y))
        engine.step()
    with launcher.zero.GatheredParameters(list(engine.module.parameters())):
        weights = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    assert not model.head.weight.requires_grad
    engine.destroy()
    assert model.head.weight.requires_grad  # the next engine may train it
    return weights, [line for line in lines if "no optimizer group" in line]


def _plain() -> dict[str, Tensor]:
    model = build("Plain")
    optimizer = torch.optim.AdamW(model.blocks.parameters(), lr=LR)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(*batch()).backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize(("stage", "brings_optimizer"), [(0, True), (1, False), (2, True), (3, False), (3, True)])
def test_others_are_trained_without_them(stage: int, brings_optimizer: bool) -> None:
    expected, first = _plain(), build("Plain").state_dict()
    (weights, said), (_, of_other) = run_on_ranks(2, _train, stage, brings_optimizer)
    assert said == ["not trained, for they are in no optimizer group: head.weight, head.bias"]
    assert of_other == []
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-5)
        if name.startswith("head"):
            assert torch.equal(weight, first[name])
