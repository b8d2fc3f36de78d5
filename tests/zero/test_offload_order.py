"""When gradients leave the device, when units are updated, and when the next forward waits for them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from harness.train.offload import Event, Recorder
from harness.train.ranks import run_on_ranks
from harness.train.zoo import SAMPLES, batches, build

import launcher
from launcher.zero.reducer import MAX_IN_FLIGHT

HOST = {"device": "cpu"}
BOTH = {"offload_optimizer": HOST, "offload_param": HOST}
NUM_BLOCKS = 4


def _record(rank: int, world_size: int, stage: int, zero: dict[str, Any]) -> list[list[Event]]:
    """Return what happened in two steps: [step] -> events; of blocks when their forward and backward began."""
    recorder = Recorder()
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "steps_per_print": 0,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 1072,  # a block
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 1072,
            **zero,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    # Small units are joined, below stage 3, and waited for together.
    with recorder.running(), mock.patch("launcher.sharding.grouping.MIN_OFFLOADED_UNIT_NUMEL", 0):
        engine = launcher.initialize(model=build("Plain"), config=config)[0]
        units = engine._sharded.units
        recorder.know(units)
        for number, block in enumerate(engine.module.blocks):
            assert f"blocks.{number}.up.weight" in units[number].layout.names, "a unit is a block"
            block.register_forward_pre_hook(lambda *_, number=number: recorder.note("forward", number))
            block.register_full_backward_pre_hook(lambda *_, number=number: recorder.note("backward", number))
        part, steps = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size), []
        for x, y in batches(3):
            recorder.events = []
            engine.backward(engine(x[part], y[part]))
            recorder.note("end of backward", 0)
            engine.step()
            steps.append(recorder.events)
    return steps


def record(world_size: int, stage: int, zero: dict[str, Any]) -> list[list[Event]]:
    by_rank: list[list[list[Event]]] = run_on_ranks(world_size, _record, stage, zero)
    return by_rank[0]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("stage", "zero"), [(2, {"offload_optimizer": HOST}), (3, BOTH)])
def test_gradients_leave_while_backward_still_runs(stage: int, zero: dict[str, Any], world_size: int) -> None:
    for events in record(world_size, stage, zero):
        first_backward = events.index(("backward", 0))
        left = [index for name, index in events[:first_backward] if name == "gradient to host"]
        last, num_left = NUM_BLOCKS, NUM_BLOCKS - MAX_IN_FLIGHT  # the head's first, then block by block
        assert left == list(range(last, last - num_left, -1))
        every = [index for name, index in events if name == "gradient to host"]
        assert sorted(every) == list(range(NUM_BLOCKS + 1)), "each once"


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_unit_is_sent_before_the_next_one_is_updated(stage: int, world_size: int) -> None:
    for events in record(world_size, stage, {"offload_optimizer": HOST}):
        step = [event for event in events[events.index(("end of backward", 0)) :] if event[0] != "gradient to host"]
        expected = [(name, index) for index in range(NUM_BLOCKS + 1) for name in ("update", "update to device")]
        assert step[1:] == expected


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2])
def test_updates_are_waited_for_in_the_next_forward_unit_by_unit(stage: int, world_size: int) -> None:
    first, *later = record(world_size, stage, {"offload_optimizer": HOST})
    assert not [event for event in first if event[0] == "wait"]
    for events in later:
        begun = [event for event in events if event[0] in ("wait", "forward")][: 2 * NUM_BLOCKS]
        assert begun == [(name, index) for index in range(NUM_BLOCKS) for name in ("wait", "forward")]


def test_without_overlap_nothing_is_left_on_its_way() -> None:
    for events in record(2, 2, {"offload_optimizer": HOST, "overlap_comm": False}):
        assert ("wait", 0) in events[events.index(("update", 0)) : events.index(("update", 1))]
        assert events.index(("backward", 0)) < events.index(("gradient to host", NUM_BLOCKS))


def test_parameters_are_fetched_ahead_of_their_use() -> None:
    events = record(2, 3, BOTH)[-1]  # the order is known after the first step
    forward = events[: events.index(("backward", NUM_BLOCKS - 1))]
    for block in range(1, NUM_BLOCKS):
        assert forward.index(("fetch", block)) < forward.index(("forward", block - 1))
        assert forward.index(("forward", block - 1)) < forward.index(("wait", block))


def test_what_stays_on_the_device_is_not_copied() -> None:
    zero = {"offload_optimizer": {**HOST, "ratio": 0.4}}
    for events in record(2, 2, zero):
        copied = {index for name, index in events if name in ("gradient to host", "update to device")}
        assert copied == {0, 1}  # two of four blocks and a small head: 0.4 of the elements end within the second
        assert {index for name, index in events if name == "update"} == set(range(NUM_BLOCKS + 1))
