"""A watcher on a thread of its own: no caller waits for a terminal, a pager or a pipe."""

from __future__ import annotations

import threading
from collections.abc import Callable

from launcher.base.progress import RankProgress
from launcher.fleet.signals import SignalQueue
from launcher.job.events import Watcher
from launcher.job.worker_thread import WorkerThread

_MAX_HELD_BYTES = 256 << 20  # of earlier runs, when a job starts again


class Display(Watcher):
    """Passes every event on to a watcher, in order. Any thread may call it."""

    def __init__(self, watcher: Watcher, signals: SignalQueue, on_waiting: Callable[[], object] = lambda: None) -> None:
        """signals: a stop signal ends every wait for the watcher. on_waiting: called once in each, after 2 s."""
        self._watcher = watcher
        self._signals, self._on_waiting = signals, on_waiting
        self._lock = threading.Lock()
        self._held_bytes = 0  # of output that is not shown yet
        self._thread = WorkerThread("display", tick=watcher.idle)

    @property
    def stalled_s(self) -> float:
        """How long what is being shown now has taken."""
        return self._thread.stalled_s

    def put(self, call: Callable[..., object], *args: object) -> None:
        """Have something else done in its turn."""
        self._thread.put(call, *args)

    def check(self) -> None:
        """Raise what the watcher has raised."""
        self._thread.check()

    def drain(self) -> None:
        """Wait until everything is shown."""
        done = threading.Event()
        self.put(done.set)
        self._thread.wait(done, self._signals.take_cancel, self._on_waiting)

    def wait_for_room(self) -> None:
        """Wait when very much is not shown yet: the windows of agents bound what one run adds."""
        if self._held_bytes > _MAX_HELD_BYTES:
            self.drain()

    def close(self) -> None:
        """Show everything, and end the thread."""
        self.drain()
        self._thread.close()

    def output(self, rank: int, stream: str, data: bytes) -> None:
        with self._lock:
            self._held_bytes += len(data)
        self.put(self._show, rank, stream, data)

    def progress(self, rank: int, progress: RankProgress) -> None:
        # Prints nothing, and must not pile up while nothing can be printed.
        self._watcher.progress(rank, progress)

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
