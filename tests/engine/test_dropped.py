"""An engine that is dropped right after a step leaves nothing behind that the next one trips over."""

from __future__ import annotations

import gc
import uuid
from typing import Any
from unittest import mock

import pytest
import torch
from harness.train.ranks import run_on_ranks
from harness.train.zoo import LR, SAMPLES, WEIGHT_DECAY, batches, build, train_plain

import launcher
from launcher.zero.unit import FlatUnit

NUM_ENGINES, STEPS = 3, 2


def _drop_one_after_the_other(rank: int, world_size: int, stage: int, key: str) -> list[list[float]]:
    """Train, drop the engine, begin anew. Return this rank's losses with each engine.

    Of the last step rank 1 begins to send its part only when rank 0's garbage collector has taken the engine.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    publish, losses = FlatUnit.write_back, []

    def publish_late(unit: FlatUnit, **how: Any) -> None:
        store.wait([f"{key} {len(losses)}"])
        publish(unit, **how)

    for _ in range(NUM_ENGINES):
        config = {
            "train_micro_batch_size_per_gpu": SAMPLES // world_size,
            "gradient_clipping": 0.0,
            "steps_per_print": 0,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        }
        engine = launcher.initialize(model=build("Plain"), config=config)[0]
        losses.append([])
        for number, (x, y) in enumerate(batches(STEPS)):
            loss = engine(x.chunk(world_size)[rank], y.chunk(world_size)[rank])
            engine.backward(loss)
            is_late = rank == 1 and number == STEPS - 1
            with mock.patch.object(FlatUnit, "write_back", publish_late if is_late else publish):
                engine.step()
            losses[-1].append(loss.item())
        del engine, loss
        gc.collect()
        if rank == 0:
            store.set(f"{key} {len(losses)}", "collected")
    return losses


@pytest.mark.parametrize("stage", [1, 2])
def test_engines_come_and_go(stage: int) -> None:
    mean = torch.tensor(run_on_ranks(2, _drop_one_after_the_other, stage, uuid.uuid4().hex)).mean(dim=0)
    for losses in mean.tolist():
        assert losses == pytest.approx(train_plain("Plain", STEPS)[0], rel=1e-6)
