"""A rank's journal: records go through a pipe to the agent, written by a thread of its own.

Whoever adds a record appends it to a queue, which costs a microsecond and never waits. The thread makes lines of what
is there twice a second. While the agent does not read the pipe, the queue grows up to a bound, and what is lost then is
counted. Without `launch`, and with --no-journal, nothing is recorded. Standard library only: torch is the script's
business.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import math
import os
import threading
import time
from collections import deque

from launcher.base import env
from launcher.journal.records import DOUBLED_EVERY_BYTES, FLUSH_INTERVAL_S, VERSION
from launcher.journal.sample import Sampler

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MAX_WRITE_BYTES = 32 * 1024  # of one write: half of what a pipe holds
_MAX_QUEUED = 10_000  # records
_MAX_TEXT_CHARS = 2_000  # of one value of a script
# Steps that are shorter share a record. The more ranks, and the longer the file, the fewer records: a journal of a day
# and one of a month differ by a factor, and the launcher of 1,000 ranks reads as much as that of 64.
_RECORD_INTERVAL_S = 0.1
_FULL_RATE_RANKS = 64

_journal: RankJournal | None = None
_off_pid: int | None = None  # the process that has found out that it has no journal: its children may have one


class RankJournal:
    """The journal of this process. `add` may be called from any thread."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: the agent reads the other end."""
        self._descriptor, self._pipe = descriptor, os.fstat(descriptor).st_ino
        self._queue: deque[dict[str, Any]] = deque()
        self._num_dropped = 0
        self.num_bytes = 0
        self._lock = threading.Lock()  # of whoever writes
        self._is_over = threading.Event()
        self._samplers: list[Callable[[], None]] = []
        self._last_calls: list[Callable[[], None]] = []
        world_size = int(os.environ.get(env.WORLD_SIZE.name, "1"))
        self._first_interval_s = _RECORD_INTERVAL_S * max(1.0, world_size / _FULL_RATE_RANKS)
        self.pid = os.getpid()
        self.add(
            "rank",
            version=VERSION,
            rank=int(os.environ.get(env.RANK.name, "0")),
            local_rank=int(os.environ.get(env.LOCAL_RANK.name, "0")),
            host=os.uname().nodename,
            pid=self.pid,
            monotonic_s=time.monotonic(),
        )
        self._sampler = Sampler(self)
        self._thread = threading.Thread(target=self._write_on, name="journal", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def record_interval_s(self) -> float:
        """What steps are put together to: records of steps come no more often."""
        return self._first_interval_s * float(1 << (self.num_bytes // DOUBLED_EVERY_BYTES))

    def add(self, kind: str, **fields: Any) -> None:
        """Add a record. Never waits."""
        if len(self._queue) >= _MAX_QUEUED:
            self._num_dropped += 1
            return
        self._queue.append({"kind": kind, "time_s": round(time.time(), 4), **fields})

    def call_often(self, sampler: Callable[[], None]) -> None:
        """Have the journal's thread call a function twice a second: it may add records, and must not wait."""
        self._samplers.append(sampler)

    def call_at_end(self, method: Callable[[], None]) -> None:
        """Have a method called at the end of the process, to add what it still holds. Its object is kept until then."""
        self._last_calls.append(method)

    def flush(self) -> None:
        """Write what is there. Waits for the agent to read. Raises: OSError where the pipe is closed."""
        with self._lock:
            # A script may have closed descriptors that it does not know, and then opened a file of its own there.
            if os.fstat(self._descriptor).st_ino != self._pipe:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            lines = b""
            while self._queue:
                lines += encoded(self._queue.popleft())
                if len(lines) >= _MAX_WRITE_BYTES:
                    self._write(lines)
                    lines = b""
            if self._num_dropped:
                num_dropped, self._num_dropped = self._num_dropped, 0
                lines += encoded({"kind": "dropped", "time_s": time.time(), "num_records": num_dropped})
            self._write(lines)

    def close(self) -> None:
        """Write what is left, and end the thread. Nothing can be added after it."""
        if os.getpid() != self.pid or self._is_over.is_set():
            return
        for method in self._last_calls:
            with contextlib.suppress(Exception):  # of a device that has failed: nothing may change how the script ends
                method()
        self._is_over.set()
        self._thread.join()

    def _write_on(self) -> None:
        try:
            is_over = False
            while not is_over:
                is_over = self._is_over.wait(FLUSH_INTERVAL_S)
                self._sampler.look()
                for sampler in self._samplers:
                    sampler()
                self.flush()
        except OSError:  # the script has closed the pipe; or the agent has gone, and this process is about to go too
            self._is_over.set()
            global _off_pid
            _off_pid = self.pid

    def _write(self, lines: bytes) -> None:
        left = memoryview(lines)
        self.num_bytes += len(left)
        while left:
            left = left[os.write(self._descriptor, left) :]


def encoded(record: dict[str, Any]) -> bytes:
    """Return a record as a line. Numbers that JSON has not, NaN and infinity, become text."""
    try:
        text = _encoder.encode(record)
    except ValueError:
        text = _encoder.encode(_finite(record))
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _shown(value: object) -> object:
    """Return what a journal has in place of a value that JSON does not know: a number of a tensor, else its text."""
    try:
        number = float(value)  # type: ignore[arg-type]  # a tensor of one element, a numpy number
        return number if math.isfinite(number) else str(number)
    except Exception:  # noqa: BLE001  # whatever a script gave
        return repr(value)[:_MAX_TEXT_CHARS]


_encoder = json.JSONEncoder(default=_shown, allow_nan=False, separators=(",", ":"))


def own_journal() -> RankJournal | None:
    """Return the journal of this process; None where it has none: it is no rank of `launch`, or has --no-journal."""
    global _journal, _off_pid
    own_pid = os.getpid()
    if own_pid == _off_pid:
        return None
    if _journal is not None:
        return _journal if _journal.pid == own_pid else None
    pid, _, descriptor = os.environ.get(env.JOURNAL_FD.name, "").partition(":")
    if pid != str(own_pid):  # also that of a child: its descriptors are others
        _off_pid = own_pid
        return None
    _journal = RankJournal(int(descriptor))
    return _journal


def log(**values: Any) -> None:
    """Add values to this rank's journal, such as `launcher.log(step=step, accuracy=0.9)`. Never waits.

    Numbers become curves of `launch top` and `launch report`, over `step` where it is one of them; other values are
    shown as text. Does nothing without `launch`. Raises: TypeError without any value.
    """
    if not values:
        raise TypeError("log() takes at least one value, such as launcher.log(step=step, accuracy=0.9)")
    journal = own_journal()
    if journal is not None:
        journal.add("log", values=values)
