"""Samples per second with a clock that is set by hand."""

from __future__ import annotations

from launcher.monitor.meters import ThroughputTimer


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def run(timer: ThroughputTimer, clock: FakeClock, micro_steps: int, accumulation: int, seconds: float) -> None:
    for micro_step in range(1, micro_steps + 1):
        timer.start()
        clock.now_s += seconds
        timer.stop(global_step=micro_step % accumulation == 0)


def test_the_first_step_does_not_count() -> None:
    clock = FakeClock()
    timer = ThroughputTimer(32, 10, clock=clock)
    run(timer, clock, micro_steps=1, accumulation=1, seconds=1000.0)
    assert timer.samples_per_s == 0.0
    run(timer, clock, micro_steps=4, accumulation=1, seconds=0.5)
    assert timer.samples_per_s == 64.0


def test_accumulation_counts_the_whole_batch_once() -> None:
    clock = FakeClock()
    timer = ThroughputTimer(32, 10, clock=clock)
    run(timer, clock, micro_steps=12, accumulation=4, seconds=0.25)
    assert timer.samples_per_s == 32.0


def test_each_window_starts_anew() -> None:
    clock = FakeClock()
    timer = ThroughputTimer(10, 2, clock=clock)
    run(timer, clock, micro_steps=3, accumulation=1, seconds=10.0)
    clock.now_s += 500.0  # an evaluation between windows is not training time
    run(timer, clock, micro_steps=2, accumulation=1, seconds=1.0)
    assert timer.samples_per_s == 10.0
