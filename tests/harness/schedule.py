"""Which tests stay together on one worker, in which order they start, and where the time went.

`make test` runs several workers (pytest-xdist): tests that wait run beside tests that compute. Tests of one group run
on one worker, one after the other; every other test runs wherever there is room. Without workers nothing here matters.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).resolve().parents[2]
# Seconds of every file that takes some, and of long tests that run anywhere, from a run of `make test`. Only the order
# hangs on it.
_SECONDS = Path(__file__).with_name("seconds.json")
_UNKNOWN_S = 1.0  # of a file that is not listed: most take less
_LONG_S = 5.0  # from then on a test is listed, too: others of its file may take no time
_NUM_SHOWN = 12
_SLURM = "slurm"
_RANKS = ("from harness.train.ranks import", "from harness.train.programs import")


def group_of(nodeid: str) -> str:
    """Return the name of the tests that must run where this one does; its own when it may run anywhere."""
    path, _, name = nodeid.partition("::")
    if path.startswith("tests/slurm/") or "[srun-" in name:
        return _SLURM  # real daemons, which take seconds to start and every core of the machine for their own
    return _group_of_file(path) or nodeid


@functools.cache
def _group_of_file(path: str) -> str | None:
    text = (_ROOT / path).read_text()
    if any(name in text for name in ("run_cases", "launch_cases", "run_with_transformers", "preload=IMPORTS")):
        return "transformers"  # forks of one process that has imported it
    if "train.rehearsed" in text or "import rehearsed" in text:
        return "transformers and the compiler"  # which forks of one process have
    if "split_models" in text:
        return "transformers on ranks"  # each rank of a worker imports it, once
    # What a file sets up once: ranks that have torch loaded, fixtures of the module.
    return path if any(part in text for part in (*_RANKS, 'scope="module"')) else None


def arrange(items: list[pytest.Item]) -> None:
    """Put the groups that take longest first: what starts last decides when all have ended.

    Those that compute and those that wait take turns, each after the same part of its kind's time: while all workers
    compute they share the cores, and while all wait the cores are idle.
    """
    seconds = json.loads(_SECONDS.read_text())
    num_tests: dict[str, int] = defaultdict(int)
    for item in items:
        num_tests[item.location[0]] += 1
    groups: dict[str, float] = defaultdict(float)
    for item in items:
        path = item.location[0]
        groups[group_of(item.nodeid)] += seconds.get(item.nodeid, seconds.get(path, _UNKNOWN_S) / num_tests[path])
    begins: dict[str, float] = {}
    for waits in (True, False):
        kind = sorted((name for name in groups if _waits(name) == waits), key=lambda name: -groups[name])
        ends = list(itertools.accumulate(groups[name] for name in kind))
        begins.update((name, (end - groups[name]) / ends[-1]) for name, end in zip(kind, ends, strict=True))
    items.sort(key=lambda item: begins[group_of(item.nodeid)])  # stable: a group's tests stay in order


def _waits(group: str) -> bool:
    """Whether a group's tests mostly wait, as those of `launch` do, in place of computing on ranks."""
    if group.startswith("transformers"):
        return False
    return group == _SLURM or "::" in group or not any(part in (_ROOT / group).read_text() for part in _RANKS)


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return what hands the groups to the workers, in the order of `arrange`."""
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return GroupScheduling(config, log)


class Clock:
    """Adds up the seconds of every file, group and worker."""

    def __init__(self) -> None:
        self._files: dict[str, float] = defaultdict(float)
        self._tests: dict[str, float] = defaultdict(float)  # that run anywhere
        self._groups: dict[str, float] = defaultdict(float)
        self._workers: dict[str, float] = defaultdict(float)

    def add(self, report: pytest.TestReport) -> None:
        """Count a phase of a test."""
        group = group_of(report.nodeid)
        self._files[report.location[0]] += report.duration
        self._groups["(any worker)" if "::" in group else group] += report.duration
        if "::" in group:
            self._tests[group] += report.duration
        worker: Any = getattr(report, "node", None)
        if worker is not None:
            self._workers[worker.gateway.id] += report.duration

    def write(self, path: Path) -> None:
        """Write the seconds of the files that take at least one, and of long tests, for `seconds.json`."""
        long = {name: total_s for name, total_s in self._tests.items() if total_s >= _LONG_S}
        found = {name: round(total_s) for name, total_s in sorted({**self._files, **long}.items()) if total_s >= 1}
        path.write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n")

    def lines(self) -> list[str]:
        """Tell what the workers were busy with, the longest groups first."""
        workers = ", ".join(f"{name} {total_s:.0f} s" for name, total_s in sorted(self._workers.items()))
        groups = sorted(self._groups.items(), key=lambda item: -item[1])[:_NUM_SHOWN]
        return [f"busy: {workers}", *(f"{total_s:7.1f} s  {name}" for name, total_s in groups)]
