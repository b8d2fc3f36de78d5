"""Sequence parallelism in the engine: every stage trains as one process does, and saves what any other mesh loads."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import sequences
from harness.ranks import run_on_ranks
from harness.sequences import BATCH, batch_of, make_decoder
from torch import Tensor

import launcher

STEPS = 20


@functools.cache
def expected(key_heads: int = sequences.KEY_HEADS) -> tuple[list[float], list[float], dict[str, Tensor]]:
    return sequences.reference(STEPS, key_heads)


def make_engine(world_size: int, sequence: int, stage: int, key_heads: int = 2, **more: Any) -> Any:
    num_samples = BATCH * sequence // world_size // more.get("gradient_accumulation_steps", 1)
    config = sequences.config(stage, num_samples, sequence, **more)
    return launcher.initialize(model=make_decoder(key_heads), config=config)[0]


def train(engine: Any, num_steps: int) -> tuple[list[float], list[float]]:
    """Take steps from where the engine is; return the losses of all samples, and the norms."""
    num_parts, size = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
    losses, norms = [], []
    for _ in range(num_steps):
        batch, step_losses = batch_of(engine.global_steps), []
        for part in range(num_parts):
            first = (engine.get_data_parallel_rank() * num_parts + part) * size
            own = launcher.shard_sequence({name: value[first : first + size] for name, value in batch.items()})
            loss = launcher.sequence_loss(engine(**own), own["shift_labels"])
            engine.backward(loss)
            engine.step()
            step_losses.append(loss.detach().double())
        mean = torch.stack(step_losses).mean()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / engine.world_size)
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def _trained(rank: int, world_size: int, sequence: int, stage: int, more: dict[str, Any]) -> Any:
    torch.manual_seed(rank)
    engine = make_engine(world_size, sequence, stage, **more)
    losses, norms = train(engine, STEPS)
    weights = engine.state_dict()
    engine.destroy()
    return losses, norms, weights


def check_weights(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        # Of the whole parameter: Adam makes steps of rounding where an element's gradient is nothing else.
        assert (found[name] - value).norm() <= 1e-4 * value.norm(), name


@pytest.mark.parametrize(
    ("world_size", "sequence", "stage", "more"),
    [
        (2, 2, 0, {}),
        (2, 2, 1, {"gradient_accumulation_steps": 2}),
        (2, 2, 2, {"key_heads": 1}),
        (2, 2, 3, {}),
        (4, 2, 0, {}),
        (4, 2, 1, {}),
        (4, 2, 2, {"gradient_accumulation_steps": 2}),
        (4, 2, 3, {}),
        (4, 4, 3, {}),
    ],
)
def test_every_stage_trains_as_one_process_does(
    world_size: int, sequence: int, stage: int, more: dict[str, Any]
) -> None:
    losses, norms, weights = expected(more.get("key_heads", sequences.KEY_HEADS))
    for found_losses, found_norms, found_weights in run_on_ranks(world_size, _trained, sequence, stage, more):
        assert found_losses == pytest.approx(losses, rel=1e-6)
        assert found_norms == pytest.approx(norms, rel=1e-4)
        check_weights(found_weights, weights)
