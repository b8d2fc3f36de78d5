"""Readers and disks that stall: a pipe that nobody reads, and log files that are named pipes."""

from __future__ import annotations

import os
from pathlib import Path

# Runs the command line with a job id that is known before, so that a test can put something in the run folder's place.
# Also shortens the wait for a disk at the end of a run.
DRIVER = """
import os, sys
job_id, limit_s = sys.argv[1], float(sys.argv[2])
del sys.argv[1:3]
from launcher.base.timeouts import Timeouts
from launcher.job import logs
from launcher.plan import planning
planning.new_job_id = lambda: job_id
logs.timeouts = lambda: Timeouts(disk_stall_s=limit_s)
logs.create_private = lambda path: os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)  # a pipe that is there will do
from launcher.__main__ import main
main()
"""
# Writes numbered lines until the file "enough" is there, and at least as many as its first argument says.
LOUD = """
    import os, sys, time
    number = 0
    while number < int(sys.argv[1]) or not os.path.exists("enough"):
        print("line", number, "x" * 80, flush=number % 100 == 0)
        number += 1
    print("LAST", number, flush=True)
"""


class UnreadPipe:
    """A pipe that a command writes to and that is read when the test says so."""

    def __init__(self) -> None:
        self._read, self.write_end = os.pipe()

    def started(self) -> None:
        """Let go of the writing end, once the command has it."""
        os.close(self.write_end)

    def read_all(self) -> bytes:
        """Read to the end."""
        with os.fdopen(self._read, "rb") as file:
            return file.read()

    def close(self) -> None:
        """Go away without reading."""
        os.close(self._read)


class StalledLog:
    """A rank's log whose disk takes a few KiB and then nothing more, until `read_all` is called."""

    def __init__(self, folder: Path, job_id: str, rank: int = 0) -> None:
        """folder: parent of the run folder."""
        self.path = folder / job_id / f"rank_{rank}.log"
        self.path.parent.mkdir(parents=True)
        os.mkfifo(self.path)

    def open(self) -> None:
        """Let the launcher open the file; before, even that stalls."""
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def read_all(self) -> bytes:
        """Let the disk answer, and return what is written until the file is closed."""
        os.set_blocking(self._descriptor, True)
        with os.fdopen(self._descriptor, "rb") as file:
            return file.read()

    def close(self) -> None:
        """Let go of it; the launcher's next write fails."""
        os.close(self._descriptor)
