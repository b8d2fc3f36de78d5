"""The complete output of every rank, one file each, and its last lines for the report.

Files are written on a thread of their own: a disk that stalls holds up the ranks in the end, and nothing else.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, TypeVar

from launcher.base.errors import LauncherError
from launcher.base.fields import named
from launcher.base.private_files import append_to, create_private, make_private_folder, write_private
from launcher.base.processes import allow_files, num_open
from launcher.base.timeouts import timeouts
from launcher.job.events import RunReport, Watcher
from launcher.job.worker_thread import WorkerThread
from launcher.plan.plan import JobPlan

_T = TypeVar("_T")

_TAIL_BYTES = 4096
_WARN_AFTER_S = 5.0  # of a disk that takes so long for one write
_SPARE_FILES = 64  # for whatever else this process opens during a run


class RankLog:
    """One rank's log file: the bytes of stdout and stderr in the order they came.

    Its end is kept in memory as well, from the moment it arrives: a report does not wait for the disk.
    """

    def __init__(self, path: Path, *, keeps_open: bool = True) -> None:
        """keeps_open: hold the file open; else it is opened for each write. Raises: OSError."""
        self.path = path
        self.keeps_open = keeps_open
        self._file: BinaryIO | None = os.fdopen(create_private(path), "wb", buffering=0)
        folder = os.stat(path.parent)
        self._folder = folder.st_dev, folder.st_ino
        if not keeps_open:
            self._file.close()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self._tail_lock = threading.Lock()
        self.write_error: OSError | None = None

    def remember(self, data: bytes) -> None:
        """Keep the end of what arrives. Any thread."""
        with self._tail_lock:
            self._tail.append(data)
            self._tail_bytes += len(data)
            while len(self._tail) > 1 and self._tail_bytes - len(self._tail[0]) >= _TAIL_BYTES:
                self._tail_bytes -= len(self._tail.popleft())

    def write(self, data: bytes) -> None:
        """Append `data`. The first failing write is kept in `write_error`; it ends the file, not the job."""
        if self._file is None:
            return
        try:
            if not self.keeps_open:
                self._file = os.fdopen(append_to(self.path, self._folder), "ab", buffering=0)
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            if not self.keeps_open:
                self._file.close()
        except OSError as error:
            self.write_error = error
            self.close()

    def last_lines(self, count: int) -> tuple[str, ...]:
        """Return up to `count` last lines that are not blank. Any thread."""
        with self._tail_lock:
            kept = b"".join(self._tail)
        text = kept[-_TAIL_BYTES:].decode("utf-8", errors="replace")
        return tuple([line for line in text.splitlines() if line.strip()][-count:])

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def open_logs(plan: JobPlan) -> dict[int, RankLog]:
    """Make the run folder with an empty log of each rank, and the launcher's pid where it is wanted.

    Raises: LauncherError.
    """
    folder = plan.run_folder
    try:
        make_private_folder(folder)
        if plan.saves_pid:
            write_private(folder / "launch.pid", f"{os.getpid()}\n".encode())
        # Two files for each rank: beyond the hard limit they are opened for each write, which costs more than it saves.
        num_needed = num_open() + 2 * len(plan.placement.ranks) + _SPARE_FILES
        keeps_open = allow_files(num_needed) >= num_needed
        return {rank: RankLog(folder / f"rank_{rank}.log", keeps_open=keeps_open) for rank in plan.placement.ranks}
    except OSError as error:
        raise LauncherError(
            f"the run folder cannot be written: {error.strerror}",
            where=str(error.filename or folder),
            hint=f"choose another with {named('log_dir')}",
        ) from None


class RunFolder:
    """The files of one run, written on a thread of their own; every wait for them can be ended by the user."""

    def __init__(self, plan: JobPlan, watcher: Watcher, is_cancelled: Callable[[], bool]) -> None:
        """is_cancelled: says whether the user does not want to wait; asked while waiting."""
        self._logs: dict[int, RankLog] = {}
        self._plan, self._watcher, self._is_cancelled = plan, watcher, is_cancelled
        self._thread = WorkerThread("logs")
        self._warn_at_s = 0.0
        self._is_given_up = False

    @property
    def keeps_open(self) -> bool:
        """Whether there may be as many open files as this run has logs and journals: all logs are alike."""
        return all(log.keeps_open for log in itertools.islice(self._logs.values(), 1))

    @property
    def stalled_s(self) -> float:
        """How long the write under way has taken."""
        return self._thread.stalled_s

    def open(self) -> dict[int, RankLog]:
        """Make the folder and an empty log of each rank. Raises: LauncherError."""
        self._logs = self.make(lambda: open_logs(self._plan))
        return self._logs

    def write(self, log: RankLog, data: bytes, then: Callable[[], object] = lambda: None) -> None:
        """Append to a rank's log, later, and call `then`."""
        self._thread.put(self._write, log, data, then)

    def append(self, log: RankLog, data: bytes) -> None:
        """Append to a file of the run. On its thread: what `put` has called. What keeps it from that is a warning."""
        had_error = log.write_error is not None
        log.write(data)
        if log.write_error is not None and not had_error:
            kind = "log" if log.path.suffix == ".log" else "journal"
            self._watcher.warning(
                f"{log.path}: {log.write_error.strerror}; the {kind} is incomplete, the job continues"
            )

    def put(self, call: Callable[[], object]) -> None:
        """Have another file of the run written in its turn."""
        self._thread.put(call)

    def put_file(self, path: Path, data: bytes) -> None:
        """Have a file beside the logs written, later. What keeps it from that is a warning."""

        def write() -> None:
            try:
                write_private(path, data)
            except OSError as error:
                self._watcher.warning(f"{path} could not be written: {error.strerror}")

        self.put(write)

    def make(self, call: Callable[[], _T]) -> _T:
        """Have another file of the run written, and wait until it is. Raises: LauncherError, and what `call` raises."""
        answer = self._thread.request(call)
        if not self._wait(answer.done):
            raise LauncherError(
                "the disk does not answer",
                where=str(self._plan.run_folder),
                hint=f"choose another with {named('log_dir')}",
            )
        return answer.get()

    def save(self, report: RunReport, earlier: Sequence[RunReport] = ()) -> None:
        """Write the report of the run, or of the job with its `earlier` tries. What keeps it from that is a warning."""
        folder = self._plan.run_folder
        try:
            self.make(lambda: report.save(folder, earlier))
        except OSError as error:
            self._watcher.warning(f"{folder}/report.json could not be written: {error.strerror}")
        except LauncherError as error:
            self._watcher.warning(f"{folder}/report.json could not be written: {error.diagnostics[0].message}")

    def look(self, now_s: float) -> None:
        """Warn the user of a disk that stalls, once."""
        if self._thread.stalled_s > _WARN_AFTER_S and now_s > self._warn_at_s:
            self._warn_at_s = math.inf
            self._watcher.warning(
                f"{self._plan.run_folder}: its disk has taken no output for {_WARN_AFTER_S:.0f} s;"
                " the ranks wait once a few MiB are held"
            )

    def close(self) -> None:
        """Write what is left and close the files; a disk that stalls, and a user who leaves, end the wait."""
        if not self._wait(self._thread.request(self._close).done):
            self._watcher.warning(f"{self._plan.run_folder}: its disk does not answer; the logs are incomplete")
        self._thread.check()

    def release(self) -> None:
        """Close the files, later, and end the thread. Does not wait."""
        self._thread.put(self._close)
        self._thread.close()

    def _wait(self, done: threading.Event) -> bool:
        """Wait for the disk; it is given up once."""
        if not self._is_given_up:
            self._is_given_up = not self._thread.wait(
                done, self._is_cancelled, self._say_waiting, timeouts().disk_stall_s
            )
        return not self._is_given_up

    def _say_waiting(self) -> None:
        self._watcher.waiting(f"the disk of {self._plan.run_folder} (Ctrl-C: do not wait)")

    def _write(self, log: RankLog, data: bytes, then: Callable[[], object]) -> None:
        self.append(log, data)
        then()

    def _close(self) -> None:
        for log in self._logs.values():
            log.close()
