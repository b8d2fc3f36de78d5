"""`step()`, `zero_grad()` and `backward()` of the optimizer that `initialize()` returned are those of the engine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.train.parity import weight_distance
from harness.train.ranks import run_on_ranks
from harness.train.zoo import LR, WEIGHT_DECAY, batches, build, engine_of, train_plain
from torch import Tensor

from launcher.base.errors import EngineError

STEPS = 3
End = Callable[[Any], None]


def _optimizer(engine: Any) -> None:
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def _both(engine: Any) -> None:
    engine.step()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def _both_the_other_way(engine: Any) -> None:
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    engine.step()


def _train(rank: int, world_size: int, stage: int, end: End, micro_batches: int) -> tuple[dict[str, Tensor], int]:
    engine = engine_of(build("Plain"), stage, world_size, gradient_accumulation_steps=micro_batches)
    for x, y in batches(STEPS):
        own = zip(
            x.chunk(world_size)[rank].chunk(micro_batches), y.chunk(world_size)[rank].chunk(micro_batches), strict=True
        )
        for micro_batch in own:
            engine.optimizer.zero_grad()
            engine.optimizer.backward(engine(*micro_batch))
            end(engine)
    return engine.state_dict(), engine.global_steps


@pytest.mark.parametrize(("end", "micro_batches"), [(_optimizer, 2), (_both, 1), (_both_the_other_way, 2)])
@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (1, 2), (2, 2), (3, 2), (2, 1)])
def test_either_step_or_both_are_one(stage: int, world_size: int, end: End, micro_batches: int) -> None:
    _, expected = train_plain("Plain", STEPS)
    for weights, num_steps in run_on_ranks(world_size, _train, stage, end, micro_batches):
        assert num_steps == STEPS
        assert weight_distance(weights, expected) <= 2e-6


def _drop(rank: int, world_size: int, stage: int) -> dict[str, Tensor]:
    engine = engine_of(build("Plain"), stage, world_size)
    for x, y in batches(STEPS):
        own = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
        engine.backward(engine(own[0], -own[1]))
        engine.optimizer.zero_grad()
        engine.backward(engine(*own))
        engine.optimizer.step()
    return engine.state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_drops_what_no_step_has_followed(stage: int) -> None:
    _, expected = train_plain("Plain", STEPS)
    for weights in run_on_ranks(2, _drop, stage):
        assert weight_distance(weights, expected) <= 2e-6


def test_a_closure_is_called_before_the_step() -> None:
    model = build("Plain")
    engine = engine_of(build("Plain"), 2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    for x, y in batches(STEPS):

        def plain(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x, y)
            loss.backward()
            return loss

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            engine.optimizer.zero_grad()
            loss: Tensor = engine(x, y)
            engine.backward(loss)
            return loss

        with torch.no_grad():
            loss = engine.optimizer.step(closure)
        assert loss.item() == pytest.approx(optimizer.step(plain).item(), rel=1e-5)
    assert weight_distance(engine.state_dict(), dict(model.state_dict())) <= 2e-6


def test_steps_without_a_backward_are_errors() -> None:
    engine = engine_of(build("Plain"), 2, 1)
    with pytest.raises(EngineError, match="without a backward"):
        engine.optimizer.step()
    engine.backward(engine(*batches(1)[0]))
    engine.step()
    engine.optimizer.step()
    for step in (engine.optimizer.step, engine.step):
        with pytest.raises(EngineError, match="without a backward"):
            step()
    engine.backward(engine(*batches(1)[0]))
    engine.optimizer.step()
    with pytest.raises(EngineError, match="without a backward"):
        engine.optimizer.step()
    engine.step()
    assert engine.global_steps == 2


def test_a_step_after_dropped_gradients_updates_nothing() -> None:
    engine = engine_of(build("Plain"), 2, 1)
    before = engine.state_dict()
    engine.backward(engine(*batches(1)[0]))
    engine.optimizer.zero_grad()
    engine.optimizer.step()
    assert engine.global_steps == 0
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    with pytest.raises(EngineError, match="without a backward"):
        engine.optimizer.step()
    engine.backward(engine(*batches(1)[0]))
    engine.zero_grad()
    with pytest.raises(EngineError, match="without a backward"):
        engine.step()


def test_an_optimizer_does_not_keep_its_engine() -> None:
    engine = engine_of(build("Plain"), 2, 1)
    optimizer = engine.optimizer
    del engine
    gc.collect()
    with pytest.raises(EngineError, match="the engine of this optimizer has ended"):
        optimizer.step()
