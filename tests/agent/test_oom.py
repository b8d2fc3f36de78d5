"""Out-of-memory evidence, from files that look like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.agent.oom import OomWatch


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def kernel(tmp_path: Path) -> tuple[Path, Path]:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "self/cgroup", "0::/jobs/7\n")
    write(proc / "vmstat", "nr_free_pages 1\noom_kill 3\n")
    write(cgroups / "jobs/7/memory.events", "low 0\noom 0\noom_kill 0\n")
    write(cgroups / "jobs/7/memory.max", f"{1 << 30}\n")
    return proc, cgroups


def test_nothing_happened(kernel: tuple[Path, Path]) -> None:
    assert OomWatch(*kernel).evidence() is None


def test_the_group_s_own_limit_comes_first(kernel: tuple[Path, Path]) -> None:
    proc, cgroups = kernel
    watch = OomWatch(proc, cgroups)
    write(proc / "vmstat", "oom_kill 4\n")
    write(cgroups / "jobs/7/memory.events", "oom_kill 1\n")
    assert watch.evidence() == "the memory limit of the cgroup was reached, limit 1.0 GiB"
    assert watch.evidence() is None  # each kill is told once


def test_the_whole_machine_ran_out(kernel: tuple[Path, Path]) -> None:
    proc, cgroups = kernel
    watch = OomWatch(proc, cgroups)
    write(proc / "vmstat", "oom_kill 4\n")
    assert watch.evidence() == "the kernel's out-of-memory killer struck on this host"


def test_version_1_groups_and_unlimited_ones(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "self/cgroup", "11:cpu:/\n4:memory,hugetlb:/user\n")
    events = cgroups / "memory/user/memory.oom_control"
    write(events, "oom_kill_disable 0\noom_kill 0\n")
    write(cgroups / "memory/user/memory.limit_in_bytes", "9223372036854771712\n")
    watch = OomWatch(proc, cgroups)
    write(events, "oom_kill 2\n")
    assert watch.evidence() == "the host ran out of memory"


def test_a_kernel_without_counters(tmp_path: Path) -> None:
    assert OomWatch(tmp_path, tmp_path).evidence() is None
