"""The complete output of every rank, one file each, and its last lines for the report."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import BinaryIO

from launcher.base.errors import LauncherError
from launcher.job.plan import JobPlan

_TAIL_BYTES = 4096


class RankLog:
    """One rank's log file: the bytes of stdout and stderr in the order they came."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = path.open("wb", buffering=0)
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.write_error: OSError | None = None

    def write(self, data: bytes) -> None:
        """Append `data`. The first failing write is kept in `write_error` and ends the file, not the job."""
        self._tail.append(data)
        self._tail_bytes += len(data)
        while len(self._tail) > 1 and self._tail_bytes - len(self._tail[0]) >= _TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())
        if self._file is None:
            return
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self.write_error = error
            self.close()

    def last_lines(self, count: int) -> tuple[str, ...]:
        """Return up to `count` last lines that are not blank."""
        text = b"".join(self._tail)[-_TAIL_BYTES:].decode("utf-8", errors="replace")
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
        folder.mkdir(parents=True, exist_ok=True)
        if plan.saves_pid:
            (folder / "launch.pid").write_text(f"{os.getpid()}\n")
        return {rank: RankLog(folder / f"rank_{rank}.log") for rank in plan.placement.ranks}
    except OSError as error:
        raise LauncherError(
            f"the run folder cannot be written: {error.strerror}",
            where=str(error.filename or folder),
            hint="choose another with --log-dir",
        ) from None
