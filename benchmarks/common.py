"""What every benchmark shares: candidates in turns, tables, goals, and sections that say how they were measured."""

from __future__ import annotations

import argparse
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
# Its script is missing in an environment that only shares another one's packages.
TORCHRUN = [str(BIN / "torchrun")] if (BIN / "torchrun").exists() else [sys.executable, "-m", "torch.distributed.run"]
NOT_INSTALLED = "not installed"
sys.path.insert(0, str(ROOT / "tests"))  # hosts and ranks to measure with are those of the tests' harness
# What DeepSpeed builds belongs to this environment. A build that is killed leaves a lock, on which the next one waits.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed's own search for an accelerator is not meant to be timed

Samples = dict[str, list[float]]


def measure_in_turns(candidates: Mapping[str, Callable[[], float]], rounds: int) -> Samples:
    """Call every candidate once a round, so that a slow moment of the machine meets all of them alike.

    One round in front is not counted: it fills the page cache. The order is reversed with every round.
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
    """Return the quartiles as `low-high`, in the unit of the values; of one sample there are none."""
    if len(values) < 2:
        return "one sample"
    low, _, high = statistics.quantiles(values, n=4)
    largest = max(abs(low), abs(high))
    digits = max(0, 2 - math.floor(math.log10(largest))) if largest else 0  # three that count, alike in both
    return f"{low:.{digits}f}{'-' if low >= 0 else ' to '}{high:.{digits}f}"


def rounds_text(rounds: int, details: str = "candidates in turns") -> str:
    """Say how many samples stand behind a figure."""
    if rounds == 1:
        return f"One round ({details}): each figure is one sample"
    return f"Medians of {rounds} rounds ({details})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; rows that are too short are filled up."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    filled = [[*row, *[""] * (len(header) - len(row))] for row in rows]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in filled])


@dataclass(frozen=True)
class Goal:
    """What was asked of a figure, and what it is."""

    name: str
    asked: str
    measured: str
    is_met: bool
    why: str = ""  # it is missed


def goals_table(goals: Sequence[Goal]) -> str:
    """Return the goals of a section, each with its outcome."""
    rows = [
        [goal.name, goal.asked, goal.measured, "met" if goal.is_met else f"**missed**: {goal.why}"] for goal in goals
    ]
    return table(["goal", "asked", "measured", "outcome"], rows)


def argument_parser(description: str, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have. rounds: the default; None: there are no rounds."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help=f"samples of each figure (default {rounds})")
    parser.add_argument("--output", type=_resolved, help="file to write the section to; otherwise it is printed")
    return parser


def _resolved(text: str) -> Path:
    return Path(text).resolve()


class Section:
    """A section of a page, which says when, where, on what and by which command it was measured."""

    def __init__(self, title: str, *packages: str, command: str | None = None) -> None:
        """Note date, commit and load: those of the beginning count.

        packages: whose versions matter. command: what measures it; None: the one that runs this script.
        """
        self._title = title
        self._packages = packages
        self._began = datetime.now(timezone.utc)
        self._commit = current_commit()
        self._command = _command_line() if command is None else command
        self._load = os.getloadavg()[0]

    def provenance(self, samples: str) -> str:
        """Return the paragraph that every section begins with. samples: how many stand behind a figure."""
        versions = ", ".join(_version(name) for name in self._packages)
        gibibytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        machine = f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores, {gibibytes:.0f} GiB"
        system = f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
        return (
            f"Measured {self._began:%Y-%m-%d %H:%M} UTC at commit {self._commit}, load before {self._load:.1f}.\n"
            f"On {machine}, {system}{', ' * bool(versions)}{versions}.\n"
            f"{samples}. Command: `{self._command}`."
        )

    def write(self, samples: str, text: str, output: Path | None) -> None:
        """Write the section to a file, or show it where none was named."""
        write_page(f"## {self._title}\n\n{self.provenance(samples)}\n\n{text.strip()}\n", output)


def write_page(text: str, output: Path | None) -> None:
    """Write text to a file, whose folder is made, or show it where none was named."""
    if output is None:
        print(text)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)


def current_commit() -> str:
    """Return the commit that is measured, with `-dirty` when the code differs from it; pages do not count."""
    described = _git("rev-parse", "--short=10", "HEAD")
    if not described:
        return "unknown"
    code = ("launcher", "benchmarks", "tests/harness", "tests/soak", "examples")
    pages = (":!benchmarks/*.md", ":!benchmarks/results")
    return described + "-dirty" * bool(_git("status", "--porcelain", "--", *code, *pages))


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _command_line() -> str:
    """Return the command that runs this script, as one types it in the root of the repository."""
    words = [os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return shlex.join(["python", *words])
    threads = os.environ.get("OMP_NUM_THREADS")
    prefix = f"OMP_NUM_THREADS={threads} " if threads else ""
    return prefix + shlex.join(["launch", "--num_gpus", os.environ["LOCAL_WORLD_SIZE"], *words])


def is_installed(package: str) -> bool:
    """Whether a Python package is there. The engine under the name of DeepSpeed, as ranks find it, is none."""
    return _distribution(package) is not None


def _distribution(package: str) -> metadata.Distribution | None:
    context = metadata.DistributionFinder.Context(name=package)
    return next(iter(metadata.MetadataPathFinder.find_distributions(context)), None)


def _version(package: str) -> str:
    found = _distribution(package)
    return f"{package} {NOT_INSTALLED if found is None else found.version}"


def _cpu_name() -> str:
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    if "model name" not in found:
        return platform.machine()
    return f"{found['model name']} (family {found.get('cpu family', '?')}, model {found.get('model', '?')})"
