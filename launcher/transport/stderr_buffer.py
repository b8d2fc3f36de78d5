"""Keep the last bytes of a stderr stream, read by a thread of its own so that it can never fill and block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

MAX_TAIL_BYTES = 16 * 1024
_READ_BYTES = 32 * 1024


class StderrTail:
    """Drains `read` (blocking, b"" at the end) in a daemon thread, keeps its end, then calls `close`."""

    def __init__(self, read: Callable[[int], bytes], name: str, close: Callable[[], None] | None = None) -> None:
        self._read, self._close = read, close
        self._lock = threading.Lock()
        self._take: Callable[[bytes], None] | None = None
        self._kept = b""
        self._has_ended = False
        self._thread = threading.Thread(target=self._drain, name=f"stderr-{name}", daemon=True)
        self._thread.start()

    def listen(self, take: Callable[[bytes], None]) -> None:
        """Give what is kept, and then everything else, to `take`, on the draining thread; b"" at the stream's end."""
        with self._lock:
            self._take = take
            if self._kept:
                take(self._kept)
            if self._has_ended:
                take(b"")

    def text(self, wait_s: float = 0.0) -> str:
        """Return the kept text, whole lines; waits up to `wait_s` for the stream's end."""
        if wait_s:
            self._thread.join(wait_s)
        with self._lock:
            kept = self._kept
        if len(kept) == MAX_TAIL_BYTES:
            kept = kept.partition(b"\n")[2] or kept
        return kept.decode("utf-8", "replace").rstrip()

    def _drain(self) -> None:
        # OSError, ValueError: closed under our hands.
        with contextlib.suppress(OSError, ValueError):
            while chunk := self._read(_READ_BYTES):
                with self._lock:
                    self._kept = (self._kept + chunk)[-MAX_TAIL_BYTES:]
                    take = self._take
                if take is not None:
                    take(chunk)
        with self._lock:
            self._has_ended = True
            take = self._take
        if take is not None:
            take(b"")
        if self._close is not None:
            self._close()
