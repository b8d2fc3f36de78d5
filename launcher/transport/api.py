"""What a transport is: a way to start the agent, or a plain shell, on a host and hand over its byte streams.

Everything else (environment, arguments, ranks) travels inside the agent protocol, so a new transport
is one small file. Streams are blocking: the controller reads each channel in a thread of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Protocol

from launcher.cluster.cluster import Host


class Shared(bytes):
    """A whole frame that goes to every channel of a transport: where these share a pipe it needs to pass only once."""


class Channel(Protocol):
    """The two byte streams to one agent, plus what can be said about its end."""

    @property
    def host_name(self) -> str:
        """Name of the host as the user wrote it."""
        ...

    @property
    def window_bytes(self) -> int | None:
        """How much output of ranks may be on its way and not handled, where agents share a way to the launcher.
        None: the channel is this agent's own, and holds the agent up when nobody reads."""
        ...

    def read(self, max_bytes: int) -> bytes:
        """Return 1..max_bytes bytes of the agent's stdout, blocking; b"" when it has ended or the
        connection is lost. Called from one thread only."""
        ...

    def write(self, data: bytes) -> None:
        """Send all of `data` to the agent's stdin. May be called from several threads.

        Raises: TransportError when the connection is gone.
        """
        ...

    def close_stdin(self) -> None:
        """End the agent's stdin, which ends its lease: it stops its ranks and leaves. Idempotent."""
        ...

    def stderr_tail(self) -> str:
        """Return the last lines the agent's side wrote to stderr (the reason when it did not start)."""
        ...

    def listen_stderr(self, take: Callable[[bytes], None]) -> None:
        """Give every byte of stderr to `take` on a thread of the channel, b"" at its end. Called before anything is
        written: what came earlier than the last 16 KiB is lost."""
        ...

    def wait(self, timeout_s: float) -> int | None:
        """Return the agent's exit status (128+signal when killed), None if unknown after `timeout_s`."""
        ...

    def close(self) -> None:
        """Release the connection at once; a subprocess still running is killed. Idempotent."""
        ...


class Transport(Protocol):
    """Opens channels. One instance serves a whole job and may keep connections."""

    @property
    def name(self) -> str:
        """`local`, `ssh` or `srun`, for the plan and for error messages."""
        ...

    def command_for(self, host: Host) -> str:
        """Return the exact command that starts the agent on `host`, for `--dry-run`."""
        ...

    def open(self, host: Host) -> Channel:
        """Start the agent on `host`. Blocking, safe to call from several threads at once.

        Raises: TransportError naming the host and what to do.
        """
        ...

    def close(self) -> None:
        """Close every connection. Idempotent."""
        ...


# ---- The last bytes of a stderr stream ----


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
