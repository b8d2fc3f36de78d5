"""Samples per second over the last steps, as printed every `steps_per_print`."""

from __future__ import annotations

import time
from collections.abc import Callable


class ThroughputTimer:
    """Measures wall time between optimizer steps.

    The first step is left out: it pays for lazy initialisation (kernels, buffers, data workers).
    """

    def __init__(
        self, batch_size: int, steps_per_print: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._batch_size = batch_size
        self._steps_per_print = max(1, steps_per_print)
        self._clock = clock
        self._window_start_s: float | None = None
        self._window_num_steps = 0
        self._seen_first_step = False
        self.samples_per_s = 0.0  # of the last complete window, 0.0 before there is one

    def start(self) -> None:
        """Mark the start of a micro-step; only the first one of a window sets the clock."""
        if self._seen_first_step and self._window_start_s is None:
            self._window_start_s = self._clock()

    def stop(self, boundary: bool) -> None:
        """Mark the end of a micro-step; `boundary` says that an optimizer step was taken."""
        if not boundary:
            return
        if not self._seen_first_step:
            self._seen_first_step = True
            return
        if self._window_start_s is None:
            return
        self._window_num_steps += 1
        elapsed_s = self._clock() - self._window_start_s
        if elapsed_s > 0:
            self.samples_per_s = self._batch_size * self._window_num_steps / elapsed_s
        if self._window_num_steps >= self._steps_per_print:
            self._window_start_s = None
            self._window_num_steps = 0
