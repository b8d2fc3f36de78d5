"""A thread that makes calls one after the other, so that whoever asks for one does not wait for it.

Terminals, pagers and disks can stall for as long as they like. What writes to them runs on such a thread; what decides
about ranks never does.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")

_POLL_S = 0.1
_TICK_S = 0.25
_EXPLAIN_AFTER_S = 2.0


class Answer(Generic[_T]):
    """What a call on a `WorkerThread` returns, once it is done."""

    def __init__(self, call: Callable[[], _T]) -> None:
        self._call = call
        self._value: list[_T] = []
        self._error: Exception | None = None
        self.done = threading.Event()

    def make(self) -> None:
        """Make the call. On the worker thread."""
        try:
            self._value.append(self._call())
        except Exception as error:  # noqa: BLE001  # raised by `get`, where a caller can act on it
            self._error = error
        self.done.set()

    def get(self) -> _T:
        """Return the call's value, or raise what it raised. Only after `done`."""
        if self._error is not None:
            raise self._error
        return self._value[0]


class WorkerThread:
    """Makes calls in the order they were put, on a daemon thread. Any thread may put."""

    def __init__(self, name: str, tick: Callable[[], object] | None = None) -> None:
        """tick: called about every `_TICK_S` seconds, between two calls."""
        self._calls: queue.SimpleQueue[tuple[Callable[..., object], tuple[object, ...]] | None] = queue.SimpleQueue()
        self._tick = tick
        self._busy_since_s: float | None = None
        self._error: Exception | None = None
        in_context = contextvars.copy_context().run
        threading.Thread(target=in_context, args=(self._run,), name=name, daemon=True).start()

    @property
    def stalled_s(self) -> float:
        """How long the call under way has taken; 0 between calls."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def put(self, call: Callable[..., object], *args: object) -> None:
        """Have `call(*args)` made later. What it raises is raised by `check`."""
        self._calls.put((call, args))

    def request(self, call: Callable[[], _T]) -> Answer[_T]:
        """Have `call()` made later, and keep what it returns."""
        answer = Answer(call)
        self.put(answer.make)
        return answer

    def check(self) -> None:
        """Raise what a call has raised, if any did."""
        if self._error is not None:
            raise self._error

    def wait(
        self,
        done: threading.Event,
        is_cancelled: Callable[[], bool],
        on_waiting: Callable[[], object],
        limit_s: float = math.inf,
    ) -> bool:
        """Wait for a call to be done. False when it is not to be waited for, or one call has taken `limit_s`.

        is_cancelled: asked ten times a second. on_waiting: called once, after 2 s.
        """
        explain_at_s = time.monotonic() + _EXPLAIN_AFTER_S
        while not done.wait(_POLL_S):
            if is_cancelled() or self.stalled_s > limit_s:
                return False
            if time.monotonic() > explain_at_s:
                explain_at_s = math.inf
                on_waiting()
        return True

    def close(self) -> None:
        """End the thread once all calls are made. Does not wait."""
        self._calls.put(None)

    def _run(self) -> None:
        tick_at_s = time.monotonic() + _TICK_S
        while True:
            item = None
            if self._tick is None:
                item = self._calls.get()
            else:
                with contextlib.suppress(queue.Empty):
                    item = self._calls.get(timeout=max(0.0, tick_at_s - time.monotonic()))
                    if item is None:
                        return
                if time.monotonic() >= tick_at_s:
                    self._make(self._tick, ())
                    tick_at_s = time.monotonic() + _TICK_S
                    if item is None:
                        continue
            if item is None:
                return
            self._make(*item)

    def _make(self, call: Callable[..., object], args: tuple[object, ...]) -> None:
        self._busy_since_s = time.monotonic()
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001  # the calls behind it are made all the same; `check` raises it
            self._error = self._error or error
        self._busy_since_s = None
