"""How many hosts are connected at a time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

MAX_PARALLEL = 32  # hosts: 64 is no quicker, 8 is 1.3 times slower (250 sshd on one machine)
_SLOW_AFTER_S = 1.0


class Turns:
    """Lets a limited number of hosts be connected at a time.

    Connecting is work for this process, waiting for a host that does not answer is none: after a second a host gives
    its turn to another, so that many dead hosts cost little more than one.
    """

    def __init__(self, limit: int) -> None:
        self._free = threading.Semaphore(limit)
        self._lock = threading.Lock()
        self._since_s: dict[object, float] = {}  # of those that hold a turn

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, and hold it."""
        self._free.acquire()
        key = object()
        with self._lock:
            self._since_s[key] = time.monotonic()
        try:
            yield
        finally:
            self._give_back([key])

    def free_slow(self) -> None:
        """Take the turns of those that only wait. Called a few times a second."""
        slow_s = time.monotonic() - _SLOW_AFTER_S
        with self._lock:
            slow = [key for key, since_s in self._since_s.items() if since_s < slow_s]
        self._give_back(slow)

    def _give_back(self, keys: Sequence[object]) -> None:
        with self._lock:
            held = [key for key in keys if self._since_s.pop(key, None) is not None]
        for _ in held:
            self._free.release()
