"""Samples per second over the last steps, as printed every `steps_per_print`."""

from __future__ import annotations

import time
from collections.abc import Callable


class ThroughputTimer:
    """Measures wall time between optimizer steps.

    The first step is left out: it pays for lazy initialisation (kernels, buffers, data workers). Scripts for DeepSpeed
    read the attributes as `engine.tput_timer`: times of micro-steps, from the third optimizer step on.
    """

    def __init__(
        self, batch_size: int, steps_per_print: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """batch_size: samples of an optimizer step, over all ranks."""
        self.batch_size = batch_size
        self._steps_per_print = max(1, steps_per_print)
        self._clock = clock
        self._window_start_s: float | None = None
        self._window_num_steps = 0
        self._seen_first_step = False
        self.samples_per_s = 0.0  # of the last complete window, 0.0 before there is one
        self.initialized = False  # `start` was called
        self.started = False  # a micro-step runs
        self.start_step = 2  # the optimizer steps before the first that is measured
        self.start_time = self.end_time = 0.0  # of the last micro-step that was measured
        self.micro_step_count = self.global_step_count = 0
        self.step_elapsed_time = self.total_elapsed_time = 0.0  # of the optimizer step under way, of all

    def start(self) -> None:
        """Mark the start of a micro-step; only the first one of a window sets the clock."""
        self.initialized = self.started = True
        if self.global_step_count >= self.start_step:
            self.start_time = self._clock()
        if self._seen_first_step and self._window_start_s is None:
            self._window_start_s = self._clock()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Mark the end of a micro-step; `global_step` says that an optimizer step was taken.

        report_speed: of DeepSpeed's signature; the engine reports.
        """
        if self.started:
            self._count(global_step)
        if not global_step:
            return
        if not self._seen_first_step:
            self._seen_first_step = True
            return
        if self._window_start_s is None:
            return
        self._window_num_steps += 1
        elapsed_s = self._clock() - self._window_start_s
        if elapsed_s > 0:
            self.samples_per_s = self.batch_size * self._window_num_steps / elapsed_s
        if self._window_num_steps >= self._steps_per_print:
            self._window_start_s = None
            self._window_num_steps = 0

    def _count(self, global_step: bool) -> None:
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self.start_time > 0:
            self.end_time = self._clock()
            duration_s = self.end_time - self.start_time
            self.step_elapsed_time += duration_s
            self.total_elapsed_time += duration_s
            if global_step:
                self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second of all measured steps; -1 before there is one."""
        num_measured = self.global_step_count - self.start_step
        if num_measured <= 0 or not self.total_elapsed_time:
            return -1.0
        return self.batch_size * num_measured / self.total_elapsed_time
