"""`launch exec`: every host runs, equal output is shown once, failures are listed, nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from harness.launch.command import ROOT, Launch, nap, run_here, run_launch, wait_until
from harness.launch.sshd import LoopbackSshd

from launcher.cli.commands.exec import ExecDisplay, show_results
from launcher.cluster.cluster import Host
from launcher.cluster.nodeset import expand
from launcher.fleet.transports import SshTransports
from launcher.hosts import fanout, session
from launcher.hosts.fanout import Fanout
from launcher.hosts.session import Task
from launcher.transport.local import LocalTransport
from launcher.transport.ssh.options import SshOptions


def hosts(sshd: LoopbackSshd, folder: Path, *more: str) -> list[str]:
    path = folder / "hosts"
    path.write_text("\n".join(("127.0.0.[1-4] slots=1", *more)) + "\n")
    return ["--hostfile", str(path), "--ssh_config", str(sshd.ssh_config)]


def test_a_command_runs_here_without_a_header(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "exec", "--", "sh", "-c", "pwd; echo oops >&2; exit 3")
    assert result.out == f"{tmp_path}\n"
    assert result.said == "oops\n✗ localhost: exit code 3\n"
    assert result.code == 3


def test_options_of_the_command_and_odd_words_reach_it_untouched(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "exec", "printf", "%s|", "--hostfile", "a b", "$HOME;'", "")
    assert result.out == "--hostfile|a b|$HOME;'||\n"
    assert result.code == 0


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "exec", "no-such-program")
    assert result.code == 127, "the code every shell has for it"
    assert "no-such-program: not found" in result.err
    supervised = run_launch(tmp_path, "exec", "--supervise", "no-such-program")
    assert supervised.code == 127
    assert "no-such-program: No such file or directory" in supervised.err
    odd = run_launch(tmp_path, "exec", "--", "-c", "true")
    assert odd.code == 2
    assert "./-c" in odd.err


def test_a_line_for_a_shell_gets_a_hint(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "exec", "echo a; echo b")
    assert result.code == 127
    assert "sh -c 'echo a; echo b'" in result.err
    assert "sh -c" not in run_launch(tmp_path, "exec", "no-such-program").err


def test_what_programs_may_read(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "exec", "--json", "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (result.code, result.said) == (3, "")
    answer = {"host": "localhost", "exit_code": 3, "stdout": "out\n", "stderr": "err\n"}
    assert json.loads(result.out) == {
        "exit_code": 3,
        "hosts": [answer | {"is_cut": False, "error": None, "hint": None}],
    }


@pytest.mark.cluster
def test_a_host_is_shown_when_it_has_ended(sshd: LoopbackSshd, tmp_path: Path) -> None:
    command = f"test $RANK != 2 || until test -e {tmp_path}/go; do sleep 0.05; done; echo done; exit $RANK"
    job = Launch(tmp_path, "exec", *hosts(sshd, tmp_path), "--", "sh", "-c", command)
    wait_until(lambda: "done" in job.out, "the hosts that have ended")
    wait_until(lambda: "127.0.0.4: exit code 3" in job.err, "what befell them")
    assert job.process.poll() is None
    (tmp_path / "go").touch()
    result = job.wait()
    assert result.out.endswith("127.0.0.3:\ndone\n")  # apart from the others, which have ended before
    assert result.out_of_hosts == {f"127.0.0.{n}": "done\n" for n in range(1, 5)}
    assert result.code == 3


def test_the_output_of_all_hosts_together_is_bounded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(session, "MAX_HELD_BYTES", 1500)
    transport = LocalTransport(shell_only=True)
    words = ("sh", "-c", "yes | head -c 1000")
    tasks = [Task(Host(f"host{number}", (0,)), words, "/") for number in range(3)]
    run = Fanout(tasks, lambda _: transport, "held-job-0000", has_agents=False)
    results = run.run(30)
    assert sum(len(result.stdout) for result in results) == 1500
    assert any(result.is_cut for result in results)
    display = ExecDisplay([task.host.name for task in tasks], run.held, None)
    display.finish(results)
    assert "the rest is not shown" in capsys.readouterr().err
    assert run.held.take(10_000) == 1500, "what was shown is not held any more"


def test_what_befell_many_hosts_is_told_once(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("127.0.0.[1-4] slots=1\n127.0.0.5:2 slots=1\n")
    result = run_launch(tmp_path, "exec", "--hostfile", hostfile, "--ssh_port", "1", "true")
    assert result.code == 69
    assert "✗ 127.0.0.[1-4]: connection refused by " in result.err
    assert "@HOST port 1\n" in result.err
    assert "@127.0.0.5 port 2\n" in result.err
    assert result.err.count("connection refused") == 2


def test_an_interpreter_that_nothing_would_use_is_refused(tmp_path: Path) -> None:
    result = run_here(tmp_path, "exec", "--remote-python", "/opt/python", "true")
    assert result.code == 2
    assert "--remote-python has no effect" in result.err
    assert "add --supervise" in result.err


def test_hosts_without_a_hostfile_are_refused(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "exec", "--include", "node-a", "true")
    assert result.code == 2
    assert "name one with --hostfile" in result.err


@pytest.mark.cluster
def test_equal_output_is_shown_once(sshd: LoopbackSshd, tmp_path: Path) -> None:
    result = run_launch(tmp_path, "exec", *hosts(sshd, tmp_path), "--", "sh", "-c", "echo group $((RANK / 3))")
    assert result.code == 0, result.err
    assert result.out_of_hosts == {f"127.0.0.{n}": f"group {(n - 1) // 3}\n" for n in range(1, 5)}
    assert result.said == ""
    if not result.err:  # no host was waited for
        assert result.out == "127.0.0.[1-3]:\ngroup 0\n127.0.0.4:\ngroup 1\n"


@pytest.mark.cluster
def test_failures_do_not_stop_other_hosts_and_the_largest_code_wins(sshd: LoopbackSshd, tmp_path: Path) -> None:
    arguments = hosts(sshd, tmp_path, "no-such-host slots=1")
    result = run_launch(tmp_path, "exec", *arguments, "sh", "-c", "echo ran; exit $((RANK == 1 ? 71 : 0))")
    assert result.code == 71
    assert result.out_of_hosts == {f"127.0.0.{n}": "ran\n" for n in range(1, 5)}
    assert "✗ 127.0.0.2: exit code 71\n" in result.err
    assert "✗ no-such-host: " in result.err
    alone = run_launch(tmp_path, "exec", *arguments, "true")
    assert alone.code == 69


@pytest.mark.parametrize("is_bare", [True, False])
def test_a_folder_that_is_missing_on_a_host_is_explained(is_bare: bool) -> None:
    transport = LocalTransport(shell_only=is_bare)
    command = ("true",) if is_bare else ("program", "true")
    task = Task(Host("localhost", (0,)), command, "/no/such/folder")
    (result,) = Fanout([task], lambda _: transport, "no-folder-0000", has_agents=not is_bare).run(30)
    assert result.exit_code is None
    assert result.error is not None
    assert "it could not be started" in result.error.message
    assert "/no/such/folder" in result.error.message
    assert "from a folder that every host has" in str(result.error.hint)


@pytest.mark.cluster
def test_a_host_whose_agent_is_lost_is_named_and_swept(sshd: LoopbackSshd, tmp_path: Path) -> None:
    words = ("sh", "-c", f"test $RANK != 2 || exec setsid --wait sleep {nap('77.75')}")
    job = Launch(tmp_path, "exec", "--supervise", *hosts(sshd, tmp_path), *words)
    wait_until(lambda: len(sleeping(nap("77.75"))) == 1, "the command")
    os.kill(parent_of(parent_of(first(nap("77.75")))), signal.SIGKILL)  # the agent: between them setsid waits
    result = job.wait()
    assert result.code == 69
    assert "✗ 127.0.0.3: the agent ended or the connection was lost\n" in result.err
    assert not sleeping(nap("77.75"))


@pytest.mark.cluster
def test_a_host_that_falls_silent_is_given_up(sshd: LoopbackSshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout, "DEFAULT_LEASE_S", 2.5)
    transports = SshTransports(SshOptions(ssh_config=sshd.ssh_config))
    # It stops its own agent, whose ranks do not hear of it.
    commands = [("program", "sleep", "1"), ("program", "sh", "-c", f"kill -STOP $PPID; exec sleep {nap('76.25')}")]
    tasks = [Task(Host(f"127.0.0.{i + 1}", (0,)), command, "/") for i, command in enumerate(commands)]
    agents = []
    try:
        run = Fanout(tasks, transports.for_host, "silent-job-0000")
        watcher = threading.Thread(target=lambda: agents.append(parent_of(first(nap("76.25")))))
        watcher.start()
        good, silent = run.run(30)
        watcher.join()
    finally:
        transports.close()
    wait_until(lambda: not Path(f"/proc/{agents[0]}").exists(), "the end of the agent that was stopped")
    assert (good.exit_code, good.error) == (0, None)
    assert silent.error is not None
    assert silent.error.message in ("no heartbeat for 2 s", "no heartbeat for 3 s")
    assert run.unconfirmed_hosts == ()
    assert not sleeping(nap("76.25"))


def test_a_reader_that_leaves_ends_the_command(tmp_path: Path) -> None:
    script = f"{sys.executable} -m launcher exec seq 1 400000 | head -n 1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if not line.startswith("waiting for ")]  # on a slow machine
    assert (done.stdout, said) == ("1\n", [])


@pytest.mark.cluster
def test_a_timeout_ends_what_runs_too_long(sshd: LoopbackSshd, tmp_path: Path) -> None:
    result = run_launch(tmp_path, "exec", *hosts(sshd, tmp_path), "--timeout", "0.7", "sleep", nap("77.25"))
    assert result.code == 124
    late = re.findall(r"✗ (\S+): not done after 0.7 s\n", result.err)  # hosts that end together are in one line
    assert sorted(host for names in late for host in expand(names)) == [f"127.0.0.{number}" for number in range(1, 5)]
    assert not sleeping(nap("77.25"))


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_command_on_all_hosts(sshd: LoopbackSshd, tmp_path: Path, number: int) -> None:
    job = Launch(tmp_path, "exec", *hosts(sshd, tmp_path), "sleep", nap("77.5"))
    wait_until(lambda: len(sleeping(nap("77.5"))) == 4, "the command")
    job.signal(number)
    result = job.wait()
    assert result.code == 128 + number
    assert not sleeping(nap("77.5"))


@pytest.mark.cluster
def test_a_wait_says_what_for(sshd: LoopbackSshd, tmp_path: Path) -> None:
    result = run_launch(tmp_path, "exec", *hosts(sshd, tmp_path), "sh", "-c", "sleep $((RANK / 3 * 3))")
    assert result.code == 0
    said = re.fullmatch(r"waiting for (\S+)(?: \(ssh\))?, (\d) of 4\n", result.err)
    assert said is not None, result.err
    names = expand(said[1])  # the other hosts may still be connecting when it is said
    assert "127.0.0.4" in names
    assert len(names) == int(said[2])


@pytest.mark.parametrize("is_bare", [True, False])
def test_endless_output_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_bare: bool
) -> None:
    monkeypatch.setattr(session, "MAX_OUTPUT_BYTES", 1000)
    transport = LocalTransport(shell_only=is_bare)
    words = ("sh", "-c", "yes | head -c 5000; echo end >&2")
    task = Task(Host("localhost", (0,)), words if is_bare else ("program", *words), "/")
    (result,) = Fanout([task], lambda _: transport, "cut-job-0000", has_agents=not is_bare).run(30)
    assert result.exit_code == 0
    assert len(result.stdout) + len(result.stderr) == 1000
    assert result.is_cut
    show_results([result], has_headers=False)
    assert "the rest is not shown" in capsys.readouterr().err


def first(argument: str) -> int:
    """Wait for the `sleep` process with this argument and return its pid."""
    wait_until(lambda: bool(sleeping(argument)), "the command")
    return int(sleeping(argument)[0].parent.name)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def sleeping(argument: str) -> list[Path]:
    """Return the `sleep` processes with this argument."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes() == f"sleep\0{argument}\0".encode():
                found.append(path)
        except OSError:  # it has ended
            continue
    return found
