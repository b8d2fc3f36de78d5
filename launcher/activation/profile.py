"""Times of checkpointed functions."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch

from launcher.base.log import get_logger
from launcher.comm.groups import is_first_rank
from launcher.monitor.phases import PhaseTimer

WINDOW = 10  # rounds of forward and backward between two lines


class CheckpointProfile:
    """Adds up the times of checkpointed forwards and recomputations; rank 0 logs their means over a window."""

    def __init__(self, device: torch.device) -> None:
        self._timer = PhaseTimer(device)
        self._num_calls: Counter[str] = Counter()
        self._num_rounds = 0
        self._last = "forward"

    @contextlib.contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Time what runs inside: "forward" or "recompute". A forward after a recomputation begins a new round."""
        if phase == "forward" and self._last == "recompute":
            self._num_rounds += 1
            if self._num_rounds == WINDOW:
                self._report()
        self._last = phase
        self._num_calls[phase] += 1
        with self._timer.span(phase):
            yield

    def _report(self) -> None:
        seconds = self._timer.take().items()
        parts = [
            f"{self._num_calls[name] // WINDOW} × {name} {total_s * 1e3 / WINDOW:.2f} ms" for name, total_s in seconds
        ]
        if is_first_rank():
            get_logger().info("activation checkpoints: %s (means of %d)", " · ".join(parts), WINDOW)
        self._num_calls.clear()
        self._num_rounds = 0
