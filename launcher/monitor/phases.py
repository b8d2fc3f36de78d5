"""How long the parts of a training step take, without waiting for the device while it works."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

import torch

from launcher.comm.accelerator import device_module


class PhaseTimer:
    """Adds up the time of named phases. Phases may lie within each other.

    On a CPU this is wall time. On a GPU it is the device's time, by events that are read only in `take()`.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else device_module(device)
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.Event, torch.Event]] = []

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count what runs inside to phase `name`."""
        if self._module is not None:
            first, last = (self._module.Event(enable_timing=True) for _ in range(2))
            first.record()
            try:  # a recomputation ends in an exception of torch's as soon as it has all it needs
                yield
            finally:
                last.record()
                self._events.append((name, first, last))
        else:
            start_s = time.perf_counter()
            try:
                yield
            finally:
                self._seconds[name] += time.perf_counter() - start_s

    def take(self) -> dict[str, float]:
        """Return the seconds of every phase since the last call. On a GPU this waits for it."""
        for name, first, last in self._events:
            last.synchronize()
            self._seconds[name] += first.elapsed_time(last) / 1e3
        self._events.clear()
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
