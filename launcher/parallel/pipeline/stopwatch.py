"""How much of a step a rank of a pipeline computes; the rest it waits for other stages: the bubble."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

_Marks = tuple[torch.Event, torch.Event]


class Stopwatch:
    """Measures one step. On a GPU by events, which cost the host nothing until the result is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_async = device.type != "cpu"
        self._begun_s = self._ended_s = self._busy_s = 0.0
        self._begun: torch.Event | None = None
        self._ended: torch.Event | None = None
        self._computed: list[_Marks] = []
        self._is_running = False  # an evaluation is not measured

    def begin(self) -> None:
        """Begin with a step."""
        self._is_running = True
        self._computed.clear()
        self._busy_s, self._begun_s = 0.0, time.perf_counter()
        self._begun = self._mark() if self._is_async else None

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Count this block as computing."""
        if not self._is_running:
            yield
            return
        start_s, first = time.perf_counter(), self._mark() if self._is_async else None
        yield
        if first is not None:
            self._computed.append((first, self._mark()))
        self._busy_s += time.perf_counter() - start_s

    def end(self) -> None:
        """End the step, where all ranks of the pipeline have."""
        self._is_running = False
        self._ended_s = time.perf_counter()
        self._ended = self._mark() if self._is_async else None

    def _mark(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    @property
    def idle_fraction(self) -> float:
        """The part of the last step in which this rank did not compute. On a GPU the host waits for the step."""
        if self._begun is None or self._ended is None:
            total_s = self._ended_s - self._begun_s
            return 1.0 - self._busy_s / total_s if total_s > 0 else 0.0
        self._ended.synchronize()
        total_ms = self._begun.elapsed_time(self._ended)
        return 1.0 - sum(first.elapsed_time(last) for first, last in self._computed) / total_ms
