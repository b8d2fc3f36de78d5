"""SSH connections spread over helper processes: same errors, no orphans, and the right number of them."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path

import pytest
from harness.launching import Launch, run_launch, wait_until
from harness.sshd import LoopbackSshd

from launcher.base.errors import TransportError, UsageError
from launcher.base.processes import descendants
from launcher.cluster.cluster import Host
from launcher.fleet.agent import Agent
from launcher.fleet.fleet import Fleet
from launcher.transport.ssh.pool import SshPool
from launcher.transport.ssh.pool_size import allow_connections, num_processes
from launcher.transport.ssh.transport import SshOptions

TESTS = Path(__file__).resolve().parents[1]


def hostfile(folder: Path, num_hosts: int) -> Path:
    path = folder / "hosts"
    path.write_text(f"127.0.0.[1-{num_hosts}] slots=1\n")
    return path


def helpers_of(pid: int) -> set[int]:
    found = set()
    for child in descendants(pid):
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if b"launcher.transport.ssh.helper" in words:
            found.add(child)
    return found


def test_helpers_come_with_hosts_and_cores() -> None:
    assert num_processes(63, 64, {}) == 0
    assert num_processes(127, 64, {}) == 0, "one helper would only be in the way"
    assert num_processes(250, 2, {}) == 0, "no core is left for it"
    assert num_processes(250, 64, {}) == 3
    assert num_processes(250, 4, {}) == 2
    assert num_processes(10_000, 64, {}) == 8
    assert num_processes(3, 1, {"LAUNCH_SSH_PROCESSES": "8"}) == 3
    assert num_processes(10_000, 64, {"LAUNCH_SSH_PROCESSES": "0"}) == 0
    with pytest.raises(UsageError, match="LAUNCH_SSH_PROCESSES"):
        num_processes(1, 1, {"LAUNCH_SSH_PROCESSES": "-1"})


def test_open_files_are_allowed_for() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        allow_connections(8, has_helpers=False)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        allow_connections(100, has_helpers=False)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(756, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.cluster
def test_all_failures_are_listed_together(sshd: LoopbackSshd) -> None:
    pool = SshPool(SshOptions(config_file=sshd.ssh_config, module="harness.echo_agent", root=TESTS), 2)
    hosts = [Host(name, (0,)) for name in ("127.0.0.1", "no-such-host.invalid", "127.0.0.2", "other.invalid")]
    try:
        with pytest.raises(TransportError) as caught:
            Fleet([Agent(host) for host in hosts], lambda _: pool).connect()
    finally:
        pool.close()
    assert [found.where for found in caught.value.diagnostics] == ["no-such-host.invalid", "other.invalid"]
    assert all("cannot be resolved" in found.message for found in caught.value.diagnostics)
    assert all("ssh-" in str(found.hint) or "ssh " in str(found.hint) for found in caught.value.diagnostics)


@pytest.mark.cluster
def test_a_lost_helper_is_told_at_every_channel_of_it_and_replaced(sshd: LoopbackSshd) -> None:
    pool = SshPool(SshOptions(config_file=sshd.ssh_config, module="harness.echo_agent", root=TESTS), 2)
    first, second = (pool.open(Host(f"127.0.0.{number}", (0,))) for number in (1, 2))
    try:
        os.kill(pool.pids[0], signal.SIGKILL)
        assert first.read(10) == b""
        assert first.wait(10) is None
        with pytest.raises(TransportError, match=r"127\.0\.0\.1"):
            first.write(b"x" * (64 << 20))
        third = pool.open(Host("127.0.0.3", (0,)))  # its turn: another process has taken its place
        third.write(b"exit 6\n")
        assert third.wait(10) == 6
        second.write(b"exit 5\n")
        assert second.wait(10) == 5
    finally:
        pool.close()


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_helpers_and_commands_end_with_the_launcher(sshd: LoopbackSshd, tmp_path: Path, number: int) -> None:
    arguments = ["--hostfile", hostfile(tmp_path, 4), "--ssh_config", sshd.ssh_config]
    command = ["sh", "-c", f"echo $$ > {tmp_path}/pid.$RANK; exec sleep 78.25"]
    job = Launch(tmp_path, "exec", *arguments, "--", *command, env={"LAUNCH_SSH_PROCESSES": "2"})
    wait_until(lambda: len([f for f in tmp_path.glob("pid.*") if f.read_text()]) == 4, "the commands")
    helpers = helpers_of(job.process.pid)
    assert len(helpers) == 2
    commands = {int(file.read_text()) for file in tmp_path.glob("pid.*")}
    job.signal(number)
    assert job.wait(15).code == (130 if number == signal.SIGINT else -9)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in helpers | commands), "the end of all")


@pytest.mark.cluster
def test_jobs_run_through_helpers_too(sshd: LoopbackSshd, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; print('rank', os.environ['RANK'], flush=True)\n")
    arguments = ["--hostfile", hostfile(tmp_path, 3), "--ssh_config", sshd.ssh_config, "train.py"]
    result = run_launch(tmp_path, *arguments, env={"LAUNCH_SSH_PROCESSES": "2"})
    assert result.code == 0, result.err
    assert {f"rank {rank}" for rank in range(3)} == {
        path.read_text().strip() for path in tmp_path.glob("runs/*/rank_*.log")
    }


@pytest.mark.cluster
def test_a_megabyte_of_both_streams_arrives_whole(sshd: LoopbackSshd, tmp_path: Path) -> None:
    arguments = ["--hostfile", hostfile(tmp_path, 2), "--ssh_config", sshd.ssh_config]
    command = ["sh", "-c", "seq 1 200000; seq 200000 -1 1 >&2; exit 4"]
    result = run_launch(tmp_path, "exec", *arguments, "--", *command, env={"LAUNCH_SSH_PROCESSES": "2"})
    up = [str(number) for number in range(1, 200_001)]
    # Hosts that end far apart, as on a busy machine, are shown apart.
    one_by_one = [[f"127.0.0.{first}:", *up, f"127.0.0.{second}:", *up] for first, second in ((1, 2), (2, 1))]
    is_whole = result.out.split() in (["127.0.0.[1-2]:", *up], *one_by_one)
    assert is_whole, result.out[:200]
    lines = [line for line in result.err.splitlines() if not line.startswith("waiting for ")]  # on a busy machine
    assert lines[1:200_001] == up[::-1]
    assert result.code == 4
    assert threading.active_count() < 50
