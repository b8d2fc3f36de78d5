"""Evidence that the kernel ended a process for lack of memory."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from launcher.base.units import format_bytes


@dataclass(frozen=True)
class _Counter:
    """A line `oom_kill N` in a file of the kernel."""

    file: Path
    whose: str  # says what a rise of the counter means

    def read(self) -> int:
        """Return the count, 0 where it cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            for line in self.file.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
        return 0


class OomWatch:
    """Compares the kernel's counters of out-of-memory kills with those at the start."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._counters = _counters(proc, cgroups)
        self._before = [counter.read() for counter in self._counters]

    def evidence(self) -> str | None:
        """Say which killer was at work since the last call, the nearest one first; None when none was."""
        found = None
        for index, counter in enumerate(self._counters):
            now = counter.read()
            if now > self._before[index] and found is None:
                found = counter.whose
            self._before[index] = now
        return found


def _counters(proc: Path, cgroups: Path) -> list[_Counter]:
    counters = []
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":  # version 2
                folder = cgroups / path.lstrip("/")
                counters.append(_Counter(folder / "memory.events", _whose(folder / "memory.max")))
            elif "memory" in controllers.split(","):
                folder = cgroups / "memory" / path.lstrip("/")
                counters.append(_Counter(folder / "memory.oom_control", _whose(folder / "memory.limit_in_bytes")))
    return [*counters, _Counter(proc / "vmstat", "the kernel's out-of-memory killer struck on this host")]


def _whose(limit: Path) -> str:
    size = ""
    with contextlib.suppress(OSError, ValueError):
        size = f", limit {format_bytes(int(limit.read_text()))}"
    return f"the memory limit of the control group was reached{size}"
