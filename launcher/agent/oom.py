"""Evidence that the kernel ended a process for lack of memory."""

from __future__ import annotations

import contextlib
import os

from launcher.base.record import Record
from launcher.base.units import format_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    _Path = str | os.PathLike[str]

_UNLIMITED_BYTES = 1 << 60  # version 1 of cgroups writes the largest multiple of a page for no limit


class _Counter(Record):
    """A line `oom_kill N` in a file of the kernel."""

    file: str
    whose: str  # says what a rise of the counter means

    def read(self) -> int:
        """Return the count, 0 where it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            for line in _lines(self.file):
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        return 0


class OomWatch:
    """Compares the kernel's counters of out-of-memory kills with those at the start; each kill explains one end."""

    def __init__(self, proc: _Path = "/proc", cgroups: _Path = "/sys/fs/cgroup") -> None:
        self._counters = _counters(proc, cgroups)
        self._before = [counter.read() for counter in self._counters]

    def evidence(self) -> str | None:
        """Return which killer ended one more process than was asked about, the nearest one first; None when none did.

        To be called once for each process that SIGKILL ended, the one that held the most memory first.
        """
        found = None
        for index, counter in enumerate(self._counters):
            if counter.read() > self._before[index]:
                found = found or counter.whose
                self._before[index] += 1
        return found


def _counters(proc: _Path, cgroups: _Path) -> list[_Counter]:
    counters = []
    with contextlib.suppress(OSError):
        for line in _lines(f"{proc}/self/cgroup"):
            _, controllers, path = line.split(":", 2)
            if controllers == "":  # version 2
                folder = os.path.join(cgroups, path.lstrip("/"))
                counters.append(_Counter(f"{folder}/memory.events", _whose(f"{folder}/memory.max")))
            elif "memory" in controllers.split(","):
                folder = os.path.join(cgroups, "memory", path.lstrip("/"))
                counters.append(_Counter(f"{folder}/memory.oom_control", _whose(f"{folder}/memory.limit_in_bytes")))
    return [*counters, _Counter(f"{proc}/vmstat", "the kernel's out-of-memory killer struck on this host")]


def _whose(limit: str) -> str:
    size = ""
    with contextlib.suppress(OSError, ValueError, IndexError):
        limit_bytes = int(_lines(limit)[0])
        if limit_bytes >= _UNLIMITED_BYTES:
            return "the host ran out of memory"
        size = f", limit {format_bytes(limit_bytes)}"
    return f"the memory limit of the cgroup was reached{size}"


def _lines(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().splitlines()
