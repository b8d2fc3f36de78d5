"""The clock of a rank's steps: phases exclude each other, and together they are the whole time."""

from __future__ import annotations

import gc
import threading

import pytest

from launcher.journal.records import BACKWARD, COMMUNICATION, FORWARD, GC, SAVE, SCRIPT
from launcher.journal.steps import StepClock


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def clock(time: Time) -> StepClock:
    return StepClock(time)


def test_what_is_within_a_phase_counts_for_the_inner_one_alone(clock: StepClock, time: Time) -> None:
    time.now_s += 1
    with clock.inside(BACKWARD):
        time.now_s += 2
        with clock.inside(COMMUNICATION):
            time.now_s += 4
        time.now_s += 8
    time.now_s += 16
    assert clock.take() == (31.0, {BACKWARD: 10.0, COMMUNICATION: 4.0, SCRIPT: 17.0})
    assert clock.take() == (0.0, {})


def test_a_phase_may_lie_within_itself_and_end_with_an_exception(clock: StepClock, time: Time) -> None:
    def fail() -> None:
        with clock.inside(FORWARD), clock.inside(FORWARD):
            time.now_s += 1
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    time.now_s += 2
    assert clock.take() == (3.0, {FORWARD: 1.0, SCRIPT: 2.0})


def test_a_step_may_end_within_a_phase(clock: StepClock, time: Time) -> None:
    with clock.inside(SAVE):
        time.now_s += 1
        assert clock.is_in(SAVE)
        assert clock.take() == (1.0, {SAVE: 1.0})
        time.now_s += 2
    assert clock.take() == (2.0, {SAVE: 2.0})
    assert not clock.is_in(SAVE)


def test_pauses_of_the_garbage_collector_are_a_phase(clock: StepClock, time: Time) -> None:
    def pause(event: str, _info: object) -> None:
        time.now_s += 5 if event == "start" else 0

    gc.callbacks.append(pause)  # after the clock's own
    try:
        with clock.inside(FORWARD):
            time.now_s += 1
            gc.collect()
    finally:
        gc.callbacks.remove(pause)
    assert clock.take() == (6.0, {FORWARD: 1.0, GC: 5.0})
    assert clock.gc_longest_s == 5.0


def test_other_threads_are_told_apart(clock: StepClock) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(clock.is_in_thread()))
    thread.start()
    thread.join()
    assert found == [False]
    assert clock.is_in_thread()
