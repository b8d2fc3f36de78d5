"""A watcher on a thread of its own: no caller waits for a terminal, a pager or a pipe."""

from __future__ import annotations

import threading
from collections.abc import Callable

from launcher.fleet.signals import SignalQueue
from launcher.job.events import Watcher
from launcher.job.lane import Lane

_MAX_HELD_BYTES = 256 << 20  # of earlier runs, when a job starts again


class Display(Watcher):
    """Passes every event on to a watcher, in order. Any thread may call it."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._lock = threading.Lock()
        self._held_bytes = 0  # of output that is not shown yet
        self._lane = Lane("display", tick=watcher.idle)

    @property
    def stalled_s(self) -> float:
        """How long what is being shown now has taken."""
        return self._lane.stalled_s

    def put(self, call: Callable[..., object], *args: object) -> None:
        """Have something else done in its turn."""
        self._lane.put(call, *args)

    def check(self) -> None:
        """Raise what the watcher has raised."""
        self._lane.check()

    def drain(self, signals: SignalQueue, on_waiting: Callable[[], object]) -> bool:
        """Wait until everything is shown; False when a stop signal ended that. on_waiting: called once, after 2 s."""
        done = threading.Event()
        self.put(done.set)
        return self._lane.wait(done, signals.asks_to_leave, on_waiting)

    def wait_for_room(self, signals: SignalQueue, on_waiting: Callable[[], object]) -> None:
        """Wait, as `drain` does, when very much is not shown yet: the windows of agents bound what one run adds."""
        if self._held_bytes > _MAX_HELD_BYTES:
            self.drain(signals, on_waiting)

    def close(self, signals: SignalQueue, on_waiting: Callable[[], object]) -> None:
        """Show everything, as `drain` does, and end the thread."""
        self.drain(signals, on_waiting)
        self._lane.close()

    def output(self, rank: int, stream: str, data: bytes) -> None:
        with self._lock:
            self._held_bytes += len(data)
        self.put(self._show, rank, stream, data)

    def progress(self, rank: int, step: int, loss: float | None) -> None:
        # Prints nothing, and must not pile up while nothing can be printed.
        self._watcher.progress(rank, step, loss)

    def _show(self, rank: int, stream: str, data: bytes) -> None:
        self._watcher.output(rank, stream, data)
        with self._lock:
            self._held_bytes -= len(data)


def _in_turn(event: str) -> Callable[..., None]:
    """Return the method of `Display` that passes on an event of this name."""

    def put(display: Display, *values: object) -> None:
        display.put(getattr(display._watcher, event), *values)

    return put


for _event in vars(Watcher):
    if not _event.startswith("_") and _event not in vars(Display):
        setattr(Display, _event, _in_turn(_event))
