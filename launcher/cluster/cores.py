"""CPU cores: lists as users write them, the machine's physical cores, and equal shares for ranks."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from launcher.base.errors import UsageError
from launcher.base.units import counted

_PART = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def parse_core_list(text: str) -> tuple[int, ...]:
    """Return the CPU numbers of a list such as `0,2-5`. Raises: UsageError."""
    cores: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UsageError(f'"{part}" is not a CPU number or range', where="--bind-core-list", hint="such as 0,2-5")
        cores.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    if len(set(cores)) != len(cores):
        raise UsageError("a CPU is named twice", where="--bind-core-list", hint="name each once")
    return tuple(cores)


def physical_cores(cpus: Sequence[int], sysfs: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Return one CPU of each physical core among `cpus`, package by package: neighbours share memory and caches."""
    first: dict[tuple[int, int], int] = {}
    for cpu in sorted(cpus):
        place = (0, cpu)
        with contextlib.suppress(OSError, ValueError):
            topology = sysfs / f"cpu{cpu}" / "topology"
            package, core = (int((topology / name).read_text()) for name in ("physical_package_id", "core_id"))
            place = (package, core)
        first.setdefault(place, cpu)
    return [first[place] for place in sorted(first)]


def shares(wanted: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return the CPUs of each rank of this host.

    wanted: what to share out; () for all physical cores this process may use. Raises: UsageError.
    """
    allowed = os.sched_getaffinity(0)
    missing = [core for core in wanted if core not in allowed]
    if missing:
        raise UsageError(
            f"CPU {missing[0]} does not exist on this host or may not be used",
            hint=f"name CPUs among {_ranges(sorted(allowed))}",
        )
    cores = list(wanted) or physical_cores(sorted(allowed))
    each = len(cores) // num_ranks
    if each == 0:
        raise UsageError(
            f"{num_ranks} ranks cannot be bound to {counted(len(cores), 'core')}: each needs one of its own",
            hint="start fewer ranks on the host, name more cores, or do not bind",
        )
    return [cores[index * each : (index + 1) * each] for index in range(num_ranks)]


def _ranges(cpus: Sequence[int]) -> str:
    """Return sorted CPU numbers as `parse_core_list` reads them: "0-3,8"."""
    starts = [cpu for cpu in cpus if cpu - 1 not in cpus]
    ends = [cpu for cpu in cpus if cpu + 1 not in cpus]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
