"""What every benchmark shares: candidates measured in turns, medians, ratios, and a Markdown page."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

Samples = dict[str, list[float]]


def measure_in_turns(candidates: Mapping[str, Callable[[], float]], rounds: int) -> Samples:
    """Call every candidate once a round, so that a slow moment of the machine meets all of them alike.

    One round in front is not counted: it fills the page cache. The order turns round with every round.
    """
    samples: Samples = {name: [] for name in candidates}
    names = list(candidates)
    for number in range(-1, rounds):
        for name in names if number % 2 else reversed(names):
            value = candidates[name]()
            if number >= 0:
                samples[name].append(value)
    return samples


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """Return the quartiles as `low-high`, in the unit of the values."""
    low, _, high = statistics.quantiles(values, n=4)
    return f"{low:.4g}-{high:.4g}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def machine_line(*packages: str) -> str:
    """Say what was measured on: CPU, cores, kernel, Python and the versions of `packages`."""
    versions = [f"{name} {metadata.version(name)}" for name in packages if _is_installed(name)]
    parts = [
        f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        f"Linux {platform.release().split('-')[0]}",
        f"Python {platform.python_version()}",
        *versions,
    ]
    return "Measured on " + ", ".join(parts) + "."


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write_page(text: str, output: Path | None) -> None:
    """Write a page to a file, or show it where none was named."""
    if output is None:
        print(text)
    else:
        output.write_text(text)
