"""Every way to say when gradients are summed and when a step is taken ends with the weights of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.logs import logged
from harness.train import zoo
from harness.train.parity import weight_distance
from harness.train.ranks import run_on_ranks
from harness.train.zoo import LR, SAMPLES, WEIGHT_DECAY, batches, build
from torch import Tensor

import launcher
from launcher.base.errors import ConfigError, EngineError

STEPS = 2
PARTS = 2  # micro-batches of a step
Batches = list[tuple[Tensor, Tensor]]


def config(stage: int, world_size: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "gradient_accumulation_steps": PARTS,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        **more,
    }


# ---- ways to take one step; each must see the mean of its micro-batches ----


def _by_step(engine: Any, step: Batches) -> None:
    for x, y in step:
        engine.backward(engine(x, y))
        engine.step()


def _own_backward(engine: Any, step: Batches) -> None:
    for x, y in step:
        engine.scale(engine(x, y)).backward()
        engine.step()


def _own_backward_of_a_sum(engine: Any, step: Batches) -> None:
    engine.set_gradient_accumulation_boundary(True)
    sum(engine.scale(engine(x, y)) for x, y in step).backward()
    engine.step()


def _backwards_before_the_step(engine: Any, step: Batches) -> None:
    engine.set_gradient_accumulation_boundary(True)  # so that the first one is taken for the last one
    for x, y in step:
        engine.backward(engine(x, y))
    engine.step()


def _own_backwards_before_the_step(engine: Any, step: Batches) -> None:
    engine.set_gradient_accumulation_boundary(True)
    for loss in [engine.scale(engine(x, y)) for x, y in step]:
        loss.backward()
    engine.step()


def _boundary_found_late(engine: Any, step: Batches) -> None:
    engine.set_gradient_accumulation_boundary(False)
    for x, y in step:
        engine.backward(engine(x, y))
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def _boundary_taken_back(engine: Any, step: Batches) -> None:
    for number, (x, y) in enumerate(step):
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(x, y))
        engine.set_gradient_accumulation_boundary(number == PARTS - 1)
        engine.step()


def _fewer(engine: Any, step: Batches) -> None:
    """Two of eight micro-batches, so that each counts for a half if the user says so."""
    for number, (x, y) in enumerate(step):
        engine.set_gradient_accumulation_boundary(number == PARTS - 1)
        engine.backward(engine(x, y) / PARTS, scale_wrt_gas=False)
        engine.step()


def _no_sync(engine: Any, step: Batches) -> None:
    engine.set_gradient_accumulation_boundary(True)
    with engine.no_sync():
        for x, y in step[:-1]:
            engine.backward(engine(x, y))
    x, y = step[-1]
    engine.backward(engine(x, y))
    engine.step()


def _all_in_no_sync(engine: Any, step: Batches) -> None:
    engine.set_gradient_accumulation_boundary(True)
    with engine.no_sync():
        for x, y in step:
            engine.scale(engine(x, y)).backward()
    engine.step()


def _unmanaged(engine: Any, step: Batches) -> None:
    for x, y in step:
        engine.backward(engine(x, y))
    engine.step()


def _after_an_exception(engine: Any, step: Batches) -> None:
    def fail(_grad: Tensor) -> None:
        raise RuntimeError("on purpose")

    x, y = step[0]
    for own in (True, False):
        loss = engine(x, y)
        loss.register_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            engine.scale(loss).backward() if own else engine.backward(loss)
    _own_backward(engine, step)


WAYS: dict[str, Callable[[Any, Batches], None]] = {
    function.__name__.strip("_"): function
    for function in (
        _by_step,
        _own_backward,
        _own_backward_of_a_sum,
        _backwards_before_the_step,
        _own_backwards_before_the_step,
        _boundary_found_late,
        _boundary_taken_back,
        _fewer,
        _no_sync,
        _all_in_no_sync,
        _unmanaged,
        _after_an_exception,
    )
} | dict.fromkeys(("predivided", "prescaled", "fp16"), _backwards_before_the_step)
MORE: dict[str, dict[str, Any]] = {
    "unmanaged": {"managed_gradient_accumulation": False},
    "fewer": {"gradient_accumulation_steps": 8},
    "predivided": {"gradient_predivide_factor": 1.5},
    "prescaled": {"prescale_gradients": True},
    "fp16": {"fp16": {"enabled": True, "auto_cast": True, "initial_scale_power": 8}},
}


def steps(world_size: int) -> Iterator[Batches]:
    """The micro-batches of every step: as many samples as can be dealt evenly."""
    num_samples = SAMPLES // world_size * world_size
    given = [(x[:num_samples], y[:num_samples]) for x, y in batches(STEPS * PARTS)]
    for number in range(STEPS):
        yield given[number * PARTS : (number + 1) * PARTS]


def train(rank: int, world_size: int, stage: int, ways: list[str]) -> dict[str, dict[str, Tensor]]:
    """Train once for each way; return the final weights of each."""
    part = slice(rank * (SAMPLES // world_size), (rank + 1) * (SAMPLES // world_size))
    results = {}
    for way in ways:
        engine = launcher.initialize(model=build("Plain"), config=config(stage, world_size, **MORE.get(way, {})))[0]
        for step in steps(world_size):
            WAYS[way](engine, [(x[part], y[part]) for x, y in step])
        assert engine.global_steps == STEPS
        assert engine.skipped_steps == 0
        results[way] = engine.state_dict()
    return results


def train_plain(world_size: int) -> dict[str, Tensor]:
    """Train with plain torch on what `world_size` ranks see together; return the final weights."""
    model = build("Plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    for step in steps(world_size):
        for x, y in step:
            (model(x, y) / PARTS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def ways_at(stage: int) -> list[str]:
    return [way for way in WAYS if stage < 2 or "no_sync" not in way]


def assert_trains_as_plain_torch(stage: int, world_size: int, ways: list[str]) -> None:
    expected = train_plain(world_size)
    for found in run_on_ranks(world_size, train, stage, ways):
        assert list(found) == ways
        for way, weights in found.items():
            assert weight_distance(weights, expected) <= (2e-2 if way == "fp16" else 2e-6), way


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_way_to_accumulate(stage: int) -> None:
    assert_trains_as_plain_torch(stage, 2, ways_at(stage))


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_way_alone_and_on_three_ranks(world_size: int) -> None:
    """Alone nothing is reduced, and a world of three divides as one of two: the first and the last stage show both."""
    of_last = ways_at(3)[::2]
    assert_trains_as_plain_torch(3, world_size, of_last)
    assert_trains_as_plain_torch(0, world_size, [way for way in WAYS if way not in of_last])


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_way_at_every_stage_alone_and_on_three_ranks(stage: int, world_size: int) -> None:
    assert_trains_as_plain_torch(stage, world_size, ways_at(stage))


# ---- a pass that an exception ends ----


def _broken_after_its_sums(rank: int, world_size: int, stage: int) -> tuple[bool, dict[str, Tensor]]:
    """Between two steps let a pass fail whose sums are on their way, and when further gradients have come."""
    zero = {"stage": stage, "overlap_comm": True, "stage3_param_persistence_threshold": 0}
    settings = config(stage, world_size, gradient_accumulation_steps=1, zero_optimization=zero)
    engine = launcher.initialize(model=build("ReentrantRepeated"), config=settings)[0]

    has_late = False

    def fail(_grad: Tensor) -> None:
        nonlocal has_late
        has_late = any(unit.grads.has_late for unit in engine._sharded.units)
        raise RuntimeError("on purpose")

    for number, (x, y) in enumerate(batches(STEPS)):
        x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
        if number == 1:
            broken = x.clone().requires_grad_()
            broken.register_hook(fail)  # reached last
            with pytest.raises(RuntimeError, match="on purpose"):
                engine.backward(engine(broken, y))
            engine.zero_grad()
        engine.backward(engine(x, y))
        engine.step()
    return has_late, engine.state_dict()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_of_a_broken_pass_gets_into_the_next(stage: int, world_size: int) -> None:
    _, expected = zoo.train_plain("ReentrantRepeated", STEPS)
    for has_late, weights in run_on_ranks(world_size, _broken_after_its_sums, stage):
        # At stage 3 a block is reduced when all segments that read it have passed.
        assert has_late == (stage < 3 or world_size == 1), "the pass ended before its last gradients came"
        assert weight_distance(weights, expected) <= 2e-6


# ---- what is refused ----


def alone(stage: int = 0, **more: Any) -> Any:
    return launcher.initialize(model=build("SomeUnused"), config=config(stage, 1, **more))[0]


@pytest.mark.parametrize("stage", [2, 3])
def test_no_sync_needs_whole_gradients(stage: int) -> None:
    with pytest.raises(EngineError, match=f"cannot be used at ZeRO stage {stage}"), alone(stage).no_sync():
        pass


def test_no_sync_is_for_backwards_only() -> None:
    engine = alone()
    with engine.no_sync():
        engine.backward(engine(*batches(1)[0]))
        with pytest.raises(EngineError, match=r"step\(\) was called within no_sync"):
            engine.step()
        with pytest.raises(EngineError, match="entered within"), engine.no_sync():
            pass


def test_unused_parameters_are_an_error_where_they_are_not_to_be_ignored() -> None:
    engine = alone(zero_optimization={"ignore_unused_parameters": False}, gradient_accumulation_steps=1)
    engine.backward(engine(*batches(1)[0]))
    with pytest.raises(EngineError, match=r"no rank computed a gradient of blocks\.0\.scale, .*, blocks\.2\.extra"):
        engine.step()


def _used_by_one_rank(rank: int, world_size: int) -> Tensor:
    more = {"zero_optimization": {"stage": 1, "ignore_unused_parameters": False}, "gradient_accumulation_steps": 1}
    model = build("AlternatingPath")
    model.calls = rank  # rank 1 takes the way that leaves two blocks out
    engine = launcher.initialize(model=model, config=config(1, world_size, **more))[0]
    engine.backward(engine(*(tensor.chunk(world_size)[rank] for tensor in batches(1)[0])))
    engine.step()
    return engine.state_dict()["blocks.0.up.weight"]


def test_what_one_rank_used_is_not_unused() -> None:
    before = build("AlternatingPath").state_dict()["blocks.0.up.weight"]
    for after in run_on_ranks(2, _used_by_one_rank):
        assert not torch.equal(after, before)


def test_sizes_change_between_steps() -> None:
    engine = alone()
    engine.set_train_batch_size(4 * SAMPLES)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (4 * SAMPLES, 4)
    engine.set_train_micro_batch_size(2)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8, 2)
    with pytest.raises(ConfigError, match="not divisible"):
        engine.set_train_batch_size(3)


# Micro-batch after which the sizes change -> the accumulation steps, and where within the micro-batch.
CHANGES = {5: (4, "end"), 7: (2, "after_backward"), 12: (3, "after_forward"), 13: (5, "after_scale"), 17: (1, "end")}
ACCUMULATIONS = [3, 3, 4, 2, 3, 5, 1, 1]  # each change holds from the next step on, counted from that step


def _train_with_changes(rank: int, world_size: int, stage: int, resume_at: int | None, folder: str) -> Any:
    """Return the number of micro-batches at each optimizer step, and the weights."""

    def start() -> Any:
        more = {"gradient_accumulation_steps": 3}
        return launcher.initialize(model=build("Plain"), config=config(stage, world_size, **more))[0]

    engine, ends, number = start(), [], 0
    data = batches(sum(ACCUMULATIONS))
    while number < len(data):
        x, y = (tensor.chunk(world_size)[rank] for tensor in data[number])
        number += 1
        count, where = CHANGES.get(number - 1, (0, ""))

        loss = engine(x, y)
        if where == "after_forward":
            engine.set_train_batch_size(count * SAMPLES)
        scaled = engine.scale(loss)
        if where == "after_scale":
            engine.set_train_batch_size(count * SAMPLES)
        scaled.backward()
        if where == "after_backward":
            engine.set_train_batch_size(count * SAMPLES)
        is_boundary, num_steps = engine.is_gradient_accumulation_boundary(), engine.global_steps
        engine.step()
        if where == "end":
            engine.set_train_batch_size(count * SAMPLES)
        assert is_boundary == (engine.global_steps > num_steps)
        if is_boundary:
            ends.append(number)
        if number == resume_at:
            engine.save_checkpoint(folder)
            accumulation = engine.gradient_accumulation_steps()
            engine = start()
            engine.load_checkpoint(folder)
            engine.set_train_batch_size(accumulation * SAMPLES)
            number, resume_at = ends[-1], None  # a sum that was not finished is not in the checkpoint
            assert engine.micro_steps == number
    return ends, engine.state_dict()


@pytest.mark.parametrize(("stage", "resume_at"), [(0, None), (0, 8), (2, None), (3, None), (2, 10)])
def test_sizes_that_change_in_training_count_from_the_next_step(
    stage: int, resume_at: int | None, tmp_path: Path
) -> None:
    model = build("Plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    data = iter(batches(sum(ACCUMULATIONS)))
    for count in ACCUMULATIONS:
        optimizer.zero_grad()
        for _ in range(count):
            (model(*next(data)) / count).backward()
        optimizer.step()
    steps = [sum(ACCUMULATIONS[: number + 1]) for number in range(len(ACCUMULATIONS))]
    for ends, weights in run_on_ranks(2, _train_with_changes, stage, resume_at, str(tmp_path)):
        assert ends == steps
        assert weight_distance(weights, dict(model.state_dict())) <= 2e-6


def test_a_boundary_of_your_own_stays_where_you_put_it() -> None:
    engine = alone(gradient_accumulation_steps=3)
    taken = []
    for number, (x, y) in enumerate(batches(8)):
        if number == 4:
            engine.set_train_batch_size(2 * SAMPLES)
        engine.set_gradient_accumulation_boundary(number in (1, 6))
        engine.backward(engine(x, y))
        engine.step()
        taken.append((engine.global_steps, engine.gradient_accumulation_steps()))
    # The losses of one step are divided by one number: that of its first micro-batch.
    assert taken == [(0, 3), (1, 3), (1, 3), (1, 3), (1, 3), (1, 3), (2, 2), (2, 2)]


def test_what_is_dropped_is_not_counted() -> None:
    """`zero_grad()` drops what is left over of an epoch; called before each micro-batch it is refused."""
    engine, once = alone(), alone()
    first, *others = batches(1 + PARTS)
    engine.backward(engine(*first))
    engine.step()
    with logged() as lines:
        engine.zero_grad()
    assert any("the gradients of 1 micro-batches before it" in line for line in lines)
    for batch in others:
        for each in (engine, once):
            each.backward(each(*batch))
            each.step()
    assert engine.global_steps == 1
    assert engine.micro_steps == PARTS
    assert weight_distance(engine.state_dict(), once.state_dict()) == 0

    def loop() -> None:
        for batch in batches(2 * PARTS):
            engine.zero_grad()
            engine.backward(engine(*batch))
            engine.step()

    with pytest.raises(EngineError, match=r"zero_grad\(\) was called between the micro-batches .*leave it out"):
        loop()
