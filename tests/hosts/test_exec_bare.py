"""`launch exec` without Python on the far side: what ends, what stays, and what no process list shows."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from harness.launch.command import Launch, command_lines, nap, run_launch, running, slowness, wait_until
from harness.launch.sshd import LoopbackSshd

from launcher.cluster.cluster import Host
from launcher.hosts import shell_session
from launcher.hosts.fanout import Fanout
from launcher.hosts.session import Task
from launcher.transport.local import LocalTransport
from launcher.transport.ssh.options import SshOptions
from launcher.transport.ssh.transport import SshTransport

SECRET = "hf_0123456789secret"


def on_hosts(sshd: LoopbackSshd, folder: Path, num_hosts: int = 2) -> list[str]:
    path = folder / "hosts"
    path.write_text(f"127.0.0.[1-{num_hosts}] slots=1\n")
    return ["--hostfile", str(path), "--ssh_config", str(sshd.ssh_config)]


@pytest.mark.cluster
def test_no_python_is_needed_on_a_host(tmp_path: Path) -> None:
    refuse = 'case "$SSH_ORIGINAL_COMMAND" in *python*) exit 127;; *) eval "$SSH_ORIGINAL_COMMAND";; esac'
    with LoopbackSshd(tmp_path / "server", settings=f"ForceCommand {refuse}\n") as sshd:
        result = run_launch(tmp_path, "exec", *on_hosts(sshd, tmp_path), "echo", "hi")
    assert (result.out_of_hosts, result.said, result.code) == ({"127.0.0.1": "hi\n", "127.0.0.2": "hi\n"}, "", 0)


@pytest.mark.cluster
def test_hostile_words_reach_the_command_as_they_are(sshd: LoopbackSshd, tmp_path: Path) -> None:
    folder = tmp_path / "it's $(touch PWNED)"
    folder.mkdir()
    words = ["'; touch PWNED; '", "$(touch PWNED)", "`touch PWNED`", "a\nb", "\udcff", "", "täst", "\\", "${IFS}"]
    show = "import os,sys; print(ascii([os.getcwd(), *sys.argv[1:]]))"
    for more in ([], on_hosts(sshd, tmp_path)):
        result = run_launch(folder, "exec", *more, "--", sys.executable, "-c", show, *words)
        assert result.code == 0, result.err
        assert result.out.splitlines()[-1] == ascii([str(folder), *words])
    assert not list(tmp_path.rglob("PWNED"))


@pytest.mark.cluster
def test_no_process_list_shows_variables_or_arguments(sshd: LoopbackSshd, tmp_path: Path) -> None:
    job = Launch(
        tmp_path, "exec", *on_hosts(sshd, tmp_path), "--", "sleep", nap("79.25"), env={"HF_TOKEN": SECRET, "LANG": "C"}
    )
    wait_until(lambda: len(running("sleep", nap("79.25"))) == 2, "the command")
    commands = running("sleep", nap("79.25"))
    shown = command_lines()
    told = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in commands]
    job.signal(signal.SIGTERM)
    assert job.wait().code == 143
    assert all(f"HF_TOKEN={SECRET}".encode() in environ for environ in told)
    assert not [line for line in shown.values() if SECRET.encode() in line]
    ours = {*commands, job.process.pid}
    assert not [line for pid, line in shown.items() if nap("79.25").encode() in line and pid not in ours]


@pytest.mark.cluster
def test_what_a_command_leaves_running_stays_and_nobody_waits_for_it(sshd: LoopbackSshd, tmp_path: Path) -> None:
    # It holds both streams open, and never ends by itself in time.
    words = ("sh", "-c", f"sleep {nap('79.5')} & echo $! >> {tmp_path}/pids; echo left")
    here = run_launch(tmp_path, "exec", *words)
    there = run_launch(tmp_path, "exec", *on_hosts(sshd, tmp_path), *words)
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    try:
        assert (here.out, here.said, here.code) == ("left\n", "", 0)
        assert (there.out_of_hosts, there.said, there.code) == ({"127.0.0.1": "left\n", "127.0.0.2": "left\n"}, "", 0)
        assert sorted(running("sleep", nap("79.5"))) == sorted(pids)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.cluster
@pytest.mark.parametrize("far", [False, True], ids=["here", "ssh"])
def test_the_group_ends_when_the_launcher_is_killed(sshd: LoopbackSshd, tmp_path: Path, far: bool) -> None:
    more = on_hosts(sshd, tmp_path) if far else []
    job = Launch(tmp_path, "exec", *more, "--", "sh", "-c", f"sleep {nap('79.75')} & wait")
    wait_until(lambda: len(running("sleep", nap("79.75"))) == (2 if far else 1), "the command")
    job.signal(signal.SIGKILL)
    job.wait()
    wait_until(lambda: not running("sleep", nap("79.75")), "the end of the group")


@pytest.mark.cluster
@pytest.mark.parametrize("far", [False, True], ids=["here", "ssh"])
def test_what_ignores_the_first_signal_is_killed_after_the_grace(
    sshd: LoopbackSshd, monkeypatch: pytest.MonkeyPatch, far: bool
) -> None:
    limit_s = 3.0 * slowness()
    monkeypatch.setattr(shell_session, "GRACE_S", limit_s / 3)
    transport = SshTransport(SshOptions(ssh_config=sshd.ssh_config, shell_only=True)) if far else None
    transport_for = transport or LocalTransport(shell_only=True)
    words = ("sh", "-c", "trap 'echo asked' TERM; while :; do sleep 0.125; done", nap(""))
    task = Task(Host("127.0.0.1", (0,)), words, "/")
    run = Fanout([task], lambda _: transport_for, "stubborn-job-0000", has_agents=False)
    (result,) = run.run(limit_s)  # the trap is set by then, also on a slow machine
    transport_for.close()
    assert bytes(result.stdout) == b"asked\n"
    assert result.error is not None
    assert result.error.message == f"not done after {limit_s:g} s"
    wait_until(lambda: not running(*words), "the end of the group")


@pytest.mark.cluster
def test_a_second_interrupt_kills_at_once(sshd: LoopbackSshd, tmp_path: Path) -> None:
    trap = "trap 'touch asked.$RANK; sleep 4.5; touch late.$RANK' TERM"  # its grace is 5 s
    words = ("sh", "-c", f"{trap}; touch ready.$RANK; while :; do sleep 0.0625; done", nap(""))
    job = Launch(tmp_path, "exec", *on_hosts(sshd, tmp_path), "--", *words)
    wait_until(lambda: len(list(tmp_path.glob("ready.*"))) == 2, "the command")
    job.signal(signal.SIGINT)
    wait_until(lambda: len(list(tmp_path.glob("asked.*"))) == 2, "the first signal")
    job.signal(signal.SIGINT)
    assert job.wait().code == 130
    wait_until(lambda: not running(*words), "the end of the group")
    assert not list(tmp_path.glob("late.*"))


def test_a_command_that_kills_its_shell_is_told_so(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "exec", "sh", "-c", "echo out; kill -9 $PPID")
    assert (result.out, result.code) == ("out\n", 69)
    assert "its shell was ended before the command (exit status 137)" in result.err


@pytest.mark.cluster
def test_what_login_scripts_print_is_no_output(sshd: LoopbackSshd, tmp_path: Path) -> None:
    setup = "echo welcome; echo news >&2; SET_UP=yes; export SET_UP"
    result = run_launch(
        tmp_path, "exec", *on_hosts(sshd, tmp_path), "--setup", setup, "--", "sh", "-c", "echo $SET_UP; echo e >&2"
    )
    assert result.out_of_hosts == {"127.0.0.1": "yes\n", "127.0.0.2": "yes\n"}
    assert set(result.said.splitlines()) <= {"127.0.0.[1-2]:", "127.0.0.1:", "127.0.0.2:", "e"}
    here = run_launch(tmp_path, "exec", "--setup", setup, "--", "sh", "-c", "echo $SET_UP; echo e >&2")
    assert (here.out, here.err) == ("yes\n", "e\n")
    failing = run_launch(tmp_path, "exec", *on_hosts(sshd, tmp_path), "--setup", "echo no >&2; false", "true")
    assert failing.code == 69
    assert "--setup or --venv-script: it failed (exit status 1): no\n" in failing.err
