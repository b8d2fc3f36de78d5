"""Out-of-memory evidence, from files that look like the kernel's."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import ROOT

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
    assert watch.evidence() is None  # each kill is reported once


def test_the_whole_machine_ran_out(kernel: tuple[Path, Path]) -> None:
    proc, cgroups = kernel
    watch = OomWatch(proc, cgroups)
    write(proc / "vmstat", "oom_kill 4\n")
    assert watch.evidence() == "the kernel's out-of-memory killer struck on this host"


def test_several_kills_explain_as_many_ends(kernel: tuple[Path, Path]) -> None:
    proc, cgroups = kernel
    watch = OomWatch(proc, cgroups)
    write(proc / "vmstat", "oom_kill 5\n")
    write(cgroups / "jobs/7/memory.events", "oom_kill 2\n")
    found = [watch.evidence() for _ in range(3)]
    assert [text is not None and "cgroup" in text for text in found] == [True, True, False]
    assert found[2] is None


# `Ranks` with processes of the test in place of ranks: what it sends of those that have exited.
REAPS = """
    import os, subprocess, sys
    from collections import defaultdict
    sys.path.insert(0, sys.argv[1])
    import selectors
    from launcher.agent import ranks
    from launcher.agent.wire import Outbox
    from launcher.agent.spawn import RankProcess
    from launcher.agent.wire import Exited
    class Watch:
        num_left = int(sys.argv[2])
        def evidence(self):
            self.num_left -= 1
            return "memory ran out" if self.num_left >= 0 else None
    ranks.OomWatch = Watch
    outbox = Outbox(1)
    of_node = ranks.Ranks(outbox, selectors.DefaultSelector())
    sent = []
    outbox.send = sent.append
    big = "x = bytearray(80 << 20); "
    ends = ["raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)", big + "import os; os.kill(os.getpid(), 9)"]
    for number, end in enumerate(ends):
        process = subprocess.Popen([sys.executable, "-c", end])
        of_node._by_pid[process.pid] = RankProcess(number, process, {}, defaultdict(str), os.dup(0))
    for pid in list(of_node._by_pid):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    of_node.reap()
    print({message.rank: message.oom for message in sent if isinstance(message, Exited)})
"""


@pytest.mark.parametrize(("num_kills", "explained"), [(0, ()), (1, (2,)), (2, (1, 2)), (3, (1, 2))])
def test_only_killed_ranks_are_shown_as_out_of_memory_and_the_largest_first(
    tmp_path: Path, num_kills: int, explained: tuple[int, ...]
) -> None:
    script = scripts.write(tmp_path, REAPS)
    done = subprocess.run([sys.executable, script, ROOT, str(num_kills)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {rank: "memory ran out" if rank in explained else None for rank in range(3)}
    assert ast.literal_eval(done.stdout) == found


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
