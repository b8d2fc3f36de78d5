"""Where the cells of the fault matrix run: here, behind a real sshd, on a real Slurm, on nodes that can die."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.launch.command import Launch, wait_until
from harness.launch.nodes import MortalNodes
from harness.launch.slurm import LoopbackSlurm
from harness.launch.sshd import LoopbackSshd

from launcher.base.processes import members_of_job

LEASE_S = 3.0  # where a node can fall silent
MEMORY_LIMIT_BYTES = 300 << 20
_DISK_BYTES = 1 << 20


@dataclass
class Place:
    """Where a job's ranks run, and what can be done to its hosts there."""

    options: tuple[str, ...]
    env: dict[str, str]
    num_ranks: int
    host: str  # the name of rank 1's host in reports
    agent_parents: Callable[[], list[int]]  # processes whose children the agents are
    kill_service: Callable[[int], None] | None = None  # kills what holds an agent's connection, given its pid
    num_flood_blocks: int = 200  # megabytes that a rank writes
    revive: Callable[[], None] | None = None  # undoes that
    node: object | None = None  # rank 1's, where it is mortal
    bystander: Launch | None = None
    bystander_pids: set[int] = field(default_factory=set)

    def start_bystander(self, folder: Path, options: tuple[str, ...], env: dict[str, str], num_ranks: int = 1) -> None:
        """Start another job of this user, which nothing that happens may touch."""
        folder.mkdir(parents=True)
        script = folder / "bystander.py"
        script.write_text("import time; print('HERE', flush=True); time.sleep(3600)")
        self.bystander = Launch(folder, *options, script, env=env)
        job = self.bystander
        wait_until(lambda: job.out.count("HERE") == num_ranks, "all ranks of the other job")
        self.bystander_pids = members_of_job(job.job_id)

    @property
    def harm(self) -> str:
        """What has happened to the other job, "" when nothing has."""
        if self.bystander is None:
            return ""
        code = self.bystander.process.poll()
        if code is not None:
            return f"another job ended with {code}"
        lost = self.bystander_pids - members_of_job(self.bystander_id)
        lost &= self.bystander_pids - members_of_job(self.bystander_id)  # what is gone is missing at any time
        return f"another job has lost {lost}" if lost else ""

    def stop_bystander(self) -> None:
        """End it."""
        if self.bystander is not None:
            self.bystander.process.kill()
            self.bystander.process.wait()
            wait_until(lambda: not self.bystander_pids & members_of_job(self.bystander_id), "its end")

    @property
    def bystander_id(self) -> str:
        """The other job's id."""
        return "" if self.bystander is None else self.bystander.job_id


@contextlib.contextmanager
def local(folder: Path) -> Iterator[Place]:
    """Two ranks on this machine."""
    place = Place(("--num_gpus", "2"), {}, 2, "localhost", lambda: [os.getpid()])
    place.start_bystander(folder / "other", ("--num_gpus", "1"), {})
    try:
        yield place
    finally:
        place.stop_bystander()


@contextlib.contextmanager
def ssh(folder: Path) -> Iterator[Place]:
    """Two loopback hosts with a rank each."""
    with LoopbackSshd() as sshd:
        hosts = folder / "hosts"
        hosts.write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
        options = ("--hostfile", str(hosts), "--ssh_config", str(sshd.ssh_config), "--force_multi")

        def kill_session(agent_pid: int) -> None:
            """Kill the sshd processes between the listening one and an agent."""
            pids, pid = [], parent_of(agent_pid)
            while pid not in (sshd.pid, 0, 1):
                pids.append(pid)
                pid = parent_of(pid)
            for pid in pids:
                if Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                    os.kill(pid, signal.SIGKILL)

        place = Place(options, {}, 2, "127.0.0.2", lambda: [sshd.pid or 0], kill_session)
        place.start_bystander(folder / "other", options, {}, num_ranks=2)
        try:
            yield place
        finally:
            place.stop_bystander()


@contextlib.contextmanager
def srun(folder: Path) -> Iterator[Place]:
    """Three nodes of a Slurm cluster with a rank each."""
    with LoopbackSlurm(folder / "slurm") as slurm, contextlib.ExitStack() as stack:
        env = stack.enter_context(slurm.allocation("--gres=gpu:1"))
        place = Place((), env, 3, "n2", lambda: [slurm.daemon_pid(node) for node in slurm.nodes])
        place.kill_service = lambda _pid: slurm.stop_node("n2")
        place.num_flood_blocks = 40  # Slurm's own pipes carry less than ours
        place.revive = lambda: slurm.start_node("n2")
        other = stack.enter_context(slurm.allocation("--gres=gpu:1", nodes="n[1,3]"))
        place.start_bystander(folder / "other", (), other, num_ranks=2)
        try:
            yield place
        finally:
            place.stop_bystander()


@contextlib.contextmanager
def mortal_ssh(folder: Path) -> Iterator[Place]:
    """Two real nodes with sshd that can crash; the other job is on the first one."""
    folder.mkdir(parents=True)
    with MortalNodes(folder, 2) as nodes:
        nodes.hostfile.write_text("".join(f"{node.address} slots=1\n" for node in nodes.nodes))
        options = ("--hostfile", str(nodes.hostfile), "--ssh_config", str(nodes.ssh_config))
        second = nodes.nodes[1]
        place = Place((*options, "--lease", str(LEASE_S)), {}, 2, second.address, list, node=second)
        alone = (*options, "--force_multi", "--include", nodes.nodes[0].address)
        place.start_bystander(folder / "other", alone, {})
        try:
            yield place
        finally:
            place.stop_bystander()


@contextlib.contextmanager
def mortal_srun(folder: Path) -> Iterator[Place]:
    """Three real nodes with slurmd that can crash; the other job is on the first one."""
    folder.mkdir(parents=True)
    with MortalNodes(folder, 3) as nodes, LoopbackSlurm(folder / "slurm", nodes) as slurm:
        half = "--gres=gpu:1"
        with slurm.allocation(half) as env, slurm.allocation(half, nodes="n1") as other:
            place = Place(("--lease", str(LEASE_S)), env, 3, "n2", list, node=nodes.nodes[1])
            place.start_bystander(folder / "other", (), other)
            try:
                yield place
            finally:
                place.stop_bystander()


def parent_of(pid: int) -> int:
    """Return the parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@contextlib.contextmanager
def memory_limit(pids: list[int]) -> Iterator[Callable[[], None]]:
    """Put processes, and what they start, into a control group with a memory limit; calling it lets them out again."""
    group, limit = _memory_group()
    (group / limit).write_text(str(MEMORY_LIMIT_BYTES))

    def let_out() -> None:
        for pid in pids:
            (group.parent / "cgroup.procs").write_text(str(pid))

    for pid in pids:
        (group / "cgroup.procs").write_text(str(pid))
    try:
        yield let_out
    finally:
        let_out()
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "an empty control group")
        group.rmdir()


def _memory_group() -> tuple[Path, str]:
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root) / f"launch-matrix-{uuid.uuid4().hex[:8]}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            return group, limit
        group.rmdir()
    raise RuntimeError("no control group with a memory limit can be made here")


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[Path]:
    """Mount a small disk. Needs root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
