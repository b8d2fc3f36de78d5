"""Stage 3: models of every shape train as plain torch does, and parameters are shards when nobody needs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.parity import weight_distance, worst_relative
from harness.ranks import run_on_ranks
from harness.zoo import LR, MODELS, SAMPLES, WEIGHT_DECAY, batches, build, train_plain
from torch import Tensor

STEPS = 6
SETTINGS: dict[str, dict[str, Any]] = {
    "sharded after each use": {"stage3_max_reuse_distance": 0},
    "kept while near": {},
    "no fetching ahead": {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
    "small things whole": {"stage3_param_persistence_threshold": 100},
}


def config(world_size: int, zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        **more,
    }


def train(rank: int, world_size: int, name: str, zero: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Train through the engine; return the mean losses and the final whole weights."""
    import torch.distributed as dist

    import launcher

    engine = launcher.initialize(model=build(name), config=config(world_size, zero))[0]
    part = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
    losses = []
    for x, y in batches(STEPS):
        loss = engine(x[part], y[part])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
        for unit in engine._sharded.units:
            assert not unit.is_sharded or all(param.numel() == 0 for param in unit.members.params)
    return losses, engine.state_dict()


def skip_unused(name: str) -> bool:
    return name in ("SomeUnused", "AlternatingPath", "Mixture")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_as_plain_torch_does(name: str, setting: str) -> None:
    zero = dict(SETTINGS[setting])
    if name == "Mixture":
        zero["leaf_module"] = {"classes": ["Experts"]}
    (losses, weights), *others = run_on_ranks(2, train, name, zero)
    expected_losses, expected_weights = train_plain(name, STEPS)
    assert worst_relative(losses, expected_losses) <= 1e-6
    assert weight_distance(weights, expected_weights) <= 2e-6
    for _, other in others:
        assert all(torch.equal(other[key], value) for key, value in weights.items())
