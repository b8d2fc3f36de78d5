"""Timers of a script's own: `deepspeed.utils.timer`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.comm.device import local_device
from launcher.compat.accelerator import get_accelerator
from launcher.compat.logs import log_dist
from launcher.monitor.meters import GIB, memory_use


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """Return the mean without that share (0.1: a tenth) of the least and of the largest; 0 of nothing."""
    if not 0 <= trim_percent <= 1:
        raise EngineError(f"trim_mean(): the share is {trim_percent}", hint="give 0 to 1")
    dropped = round(len(data) * trim_percent)
    kept = sorted(data)[dropped : len(data) - dropped]
    return statistics.fmean(kept) if kept else 0.0


class WallClockTimer:
    """Adds up times between `start` and `stop`: of the host on a CPU, else of the device by its events."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._begun: Any = None
        self._pairs: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if get_accelerator().use_host_timers():
            return time.perf_counter()
        event = torch.Event(device=local_device(), enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Begin. Raises: EngineError where it has begun."""
        if self.started_:
            raise EngineError(f"timer {self.name_} is started twice", hint="call stop() first")
        self._begun, self.started_ = self._now(), True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End. reset: forget what was before. record: part of DeepSpeed's signature.

        Raises: EngineError where it has not begun.
        """
        if not self.started_:
            raise EngineError(f"timer {self.name_} is stopped and was not started", hint="call start() first")
        if reset:
            self._pairs.clear()
        self._pairs.append((self._begun, self._now()))
        self.started_ = False

    def reset(self) -> None:
        """Forget everything."""
        self.started_ = False
        self._pairs.clear()

    def _records_ms(self) -> list[float]:
        if get_accelerator().use_host_timers():
            return [(end - begun) * 1e3 for begun, end in self._pairs]
        for _, end in self._pairs[-1:]:
            end.synchronize()
        return [float(begun.elapsed_time(end)) for begun, end in self._pairs]

    def elapsed(self, reset: bool = True) -> float:
        """Return the milliseconds so far; a timer that runs continues from now. reset: forget them."""
        was_started = self.started_
        if was_started:
            self.stop()
        total_ms = sum(self._records_ms())
        if reset:
            self.reset()
        if was_started:
            self.start()
        return total_ms

    def mean(self) -> float:
        """Return the milliseconds of one, without the tenths that took least and longest."""
        return trim_mean(self._records_ms(), 0.1)


class SynchronizedWallClockTimer:
    """Timers by name: `timers("forward").start()`."""

    Timer = WallClockTimer

    def __init__(self) -> None:
        self.timers: dict[str, WallClockTimer] = {}

    def __call__(self, name: str) -> WallClockTimer:
        return self.timers.setdefault(name, WallClockTimer(name))

    def get_timers(self) -> dict[str, WallClockTimer]:
        """Return all of them."""
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """Return what this process uses of its device, as text."""
        use = memory_use(local_device())
        return f"{use} in use, at most {use.peak_bytes / GIB:.2f} GiB so far"

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the milliseconds of the named timers, each divided by `normalizer`, on `ranks`; None: on rank 0."""
        parts = [
            f"{name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}"
            for name in names
            if name in self.timers
        ]
        if memory_breakdown:
            parts.append(self.memory_usage())
        log_dist(" | ".join(["time (ms)", *parts]), list(ranks or [0]))

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return the mean milliseconds of the named timers, each divided by `normalizer`. reset: forget them."""
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in means:
                self.timers[name].reset()
        return means


class NoopTimer:
    """Takes the calls of `SynchronizedWallClockTimer` and measures nothing."""

    def __call__(self, name: str) -> NoopTimer:
        return self

    def start(self) -> None:
        """Do nothing."""

    stop = reset = log = lambda self, *args, **kwargs: None

    def elapsed(self, reset: bool = True) -> float:
        """Return 0."""
        return 0.0

    def mean(self) -> float:
        """Return 0."""
        return 0.0

    def get_timers(self) -> dict[str, WallClockTimer]:
        """Return none."""
        return {}

    def get_mean(self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Return none."""
        return {}


class ThroughputTimer:
    """Samples per second of a loop that calls `start` and `stop` around each micro-batch."""

    def __init__(
        self,
        config: Any,
        batch_size: int | None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        """config: says `enabled`, and `synchronized` to wait for the device. start_step: the first that counts."""
        self.config, self.batch_size, self.start_step = config, batch_size or 1, start_step
        self.steps_per_output, self.monitor_memory = steps_per_output, monitor_memory
        self.logging = logging_fn or get_logger().info
        self.started = False
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self._begun_s: float | None = None

    def update_epoch_count(self) -> None:
        """Begin an epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def _now(self) -> float:
        if self.config.synchronized:
            get_accelerator().synchronize()
        return time.perf_counter()

    def start(self) -> None:
        """Begin a micro-batch."""
        if self.config.enabled:
            self.started = True
            self._begun_s = self._now() if self.global_step_count >= self.start_step else None

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-batch. global_step: it ended a step. report_speed: log it every `steps_per_output` steps."""
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += int(global_step)
        if self._begun_s is None:
            return
        duration_s = self._now() - self._begun_s
        self.total_elapsed_time += duration_s
        self.step_elapsed_time += duration_s
        if global_step:
            every = self.steps_per_output
            if report_speed and every is not None and self.global_step_count % every == 0:
                self._report()
            self.step_elapsed_time = 0.0

    def _report(self) -> None:
        now = self.batch_size / max(self.step_elapsed_time, 1e-9)
        text = f"epoch {self.epoch_count}, micro-step {self.micro_step_count}, step {self.global_step_count}:"
        text += f" {self.avg_samples_per_sec():.2f} samples/s, {now:.2f} in the last step"
        self.logging(f"{text}, {SynchronizedWallClockTimer.memory_usage()}" if self.monitor_memory else text)

    def avg_samples_per_sec(self) -> float:
        """Return the mean since `start_step`; minus infinity before."""
        num_steps = self.global_step_count - self.start_step
        return self.batch_size * num_steps / self.total_elapsed_time if num_steps > 0 else float("-inf")
