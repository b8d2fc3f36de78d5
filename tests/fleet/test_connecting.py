"""Hosts that accept a connection and then say nothing, at every step of a login: each wait has an end and a reason."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import DEADLINE_S, Launch, run_launch, slowness, wait_until
from harness.launch.sshd import MuteServer, StalledServer

from launcher.base.errors import LauncherError, TransportError
from launcher.cluster.cluster import Host
from launcher.fleet import fleet, host_link
from launcher.fleet.agent_link import AgentLink
from launcher.fleet.fleet import Fleet, Liveness
from launcher.fleet.host_link import ConnectSlots
from launcher.transport.api import Channel

STEPS = {
    "greeting": "no SSH answer within",
    "login": "no answer to the login within",
    "session": "its server did not open a session within",
    "command": "its server did not start a command within",
}


@contextlib.contextmanager
def mute_hosts(folder: Path, step: str, timeout_s: int) -> Iterator[list[str]]:
    """Yield the options that name two hosts which answer up to one step. timeout_s: their ConnectTimeout."""
    (folder / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    config = folder / "config"
    own = f"Host *\n  ConnectTimeout {timeout_s}\n"
    options = ["--hostfile", str(folder / "hosts"), "--ssh_config", str(config)]
    if step == "greeting":
        with StalledServer() as stalled:
            config.write_text(f"Host *\n  Port {stalled.port}\n{own}")
            yield options
    else:
        with MuteServer(folder / "server", step) as mute:
            config.write_text(mute.ssh_config.read_text() + own)
            yield options


@pytest.mark.parametrize("step", STEPS)
def test_a_host_that_stops_answering_is_an_error_that_says_at_which_step(tmp_path: Path, step: str) -> None:
    script = scripts.write(tmp_path, "pass")
    for timeout_s in (1, 5, 25):  # a machine with other work does not come to the last steps within the first of them
        folder = tmp_path / str(timeout_s)
        folder.mkdir()
        with mute_hosts(folder, step, timeout_s) as options:
            result = run_launch(tmp_path, *options, script)
        said = f"{STEPS[step]} {timeout_s} s"
        if said in result.err:
            break
    assert result.code == 69
    assert said in result.err
    assert "127.0.0.[1-2]" in result.err or ("127.0.0.1" in result.err and "127.0.0.2" in result.err)


def test_names_of_one_server_that_does_not_answer_wait_together(tmp_path: Path) -> None:
    names = [f"name{number}" for number in range(8)]
    (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
    with StalledServer() as stalled:
        config = scripts.write(
            tmp_path, f"Host *\n HostName 127.0.0.1\n Port {stalled.port}\n ConnectTimeout 2\n", "config"
        )
        options = ("--hostfile", "hosts", "--ssh_config", str(config), "--master_addr", "127.0.0.1")
        start_s = time.monotonic()
        result = run_launch(tmp_path, *options, scripts.write(tmp_path, "pass"))
    assert result.code == 69
    assert "name[0-7]" in result.err
    assert time.monotonic() - start_s < 2 * len(names) * slowness()


@pytest.mark.parametrize(("step", "number"), [*((step, signal.SIGINT) for step in STEPS), ("command", signal.SIGTERM)])
def test_a_signal_ends_the_wait_for_a_host_at_once(tmp_path: Path, step: str, number: int) -> None:
    script = scripts.write(tmp_path, "pass")
    with mute_hosts(tmp_path, step, 500) as options:
        job = Launch(tmp_path, *options, script)
        wait_until(lambda: "waiting for 127.0.0.[1-2]" in job.err, "the line about the wait")
        job.signal(number)
        assert job.wait().code == 128 + number  # long before the hosts are given up
    assert "Traceback" not in job.err


@pytest.mark.parametrize("command", [("exec",), ("exec", "--supervise"), ("check",)])
def test_exec_and_check_wait_as_run_does(tmp_path: Path, command: tuple[str, ...]) -> None:
    words = ["true"] if command[0] == "exec" else []
    with mute_hosts(tmp_path, "command", 500) as options:
        job = Launch(tmp_path, command[0], *options, *command[1:], *words)
        wait_until(lambda: "waiting for 127.0.0.[1-2]" in job.err, "the line about the wait")
        job.signal(signal.SIGINT)
        assert job.wait().code == 130


# ---- the mechanism ----


class Sleepy:
    """Opens nothing, after a while."""

    name = "sleepy"

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s

    def command_for(self, host: Host) -> str:
        return ""

    def open(self, host: Host) -> Channel:
        time.sleep(self._duration_s)
        raise TransportError("dead", where=host.name)

    def close(self) -> None:
        return None


def test_many_dead_hosts_cost_little_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_PARALLEL", 2)
    scale = slowness()
    monkeypatch.setattr(host_link, "_SLOW_AFTER_S", 0.1 * scale)
    start_s = time.monotonic()
    with pytest.raises(TransportError) as caught:
        Fleet([AgentLink(Host(f"h{number}", (0,))) for number in range(20)], lambda _: Sleepy(1.5 * scale)).connect()
    assert [finding.where for finding in caught.value.diagnostics] == [f"h{number}" for number in range(20)]
    assert time.monotonic() - start_s < 10 * scale, "ten waves of 1.5 s take 15 s"


def test_only_those_that_wait_long_give_their_turn_away(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = ConnectSlots(1)
    with slots.take():
        slots.free_slow()
        assert not slots._free.acquire(blocking=False), "this one is still at work"
        monkeypatch.setattr(host_link, "_SLOW_AFTER_S", -1.0)
        slots.free_slow()
        assert slots._free.acquire(blocking=False)


def test_a_host_that_is_slow_to_start_is_not_silent() -> None:
    agent = AgentLink(Host("a", (0,)))
    agent.has_lease, agent.last_heard_s = True, 100.0
    liveness = Liveness([agent], 5.0)
    assert liveness.silence_s(agent, 200.0) is None, "Python may come from a cold network disk"
    agent.has_answered = True
    assert liveness.silence_s(agent, 200.0) == 100.0
    assert liveness.silence_s(agent, 104.0) is None


def test_an_interrupt_ends_the_wait_and_its_error_is_raised() -> None:
    def is_interrupted() -> None:
        raise LauncherError("enough")

    start_s = time.monotonic()
    with pytest.raises(LauncherError, match="enough"):
        Fleet([AgentLink(Host("a", (0,)))], lambda _: Sleepy(30.0), is_interrupted=is_interrupted).connect()
    assert time.monotonic() - start_s < 5 * slowness()


def test_a_channel_that_opens_after_it_was_cancelled_is_closed() -> None:
    entered, go, closed = threading.Event(), threading.Event(), threading.Event()

    class Late(Sleepy):
        def open(self, host: Host) -> Channel:
            entered.set()
            go.wait()

            class Opened:
                def close(self) -> None:
                    closed.set()

            return Opened()  # type: ignore[return-value]

    agent, failures = AgentLink(Host("a", (0,))), []

    def work() -> None:
        try:
            agent.open(lambda _: Late(0.0), ConnectSlots(1))
        except TransportError as error:
            failures.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(DEADLINE_S)
    assert agent.cancel() is None
    go.set()
    thread.join(DEADLINE_S)
    assert failures == ["a: stopped before it was connected"]
    assert closed.is_set()
