"""All transports carry bytes, ends and exit statuses alike: local, and to a real sshd by paramiko and by `ssh`."""

from __future__ import annotations

import hashlib
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.launch.command import DEADLINE_S, wait_until
from harness.launch.sshd import LoopbackSshd

from launcher.base.errors import TransportError
from launcher.base.processes import allow_connections, descendants
from launcher.cluster.cluster import Host
from launcher.fleet.agent_link import AgentLink
from launcher.fleet.fleet import Fleet
from launcher.transport.api import Channel, Transport
from launcher.transport.diagnose import start_failure
from launcher.transport.local import LocalTransport, is_local
from launcher.transport.openssh import OpenSshTransport
from launcher.transport.ssh import transport as ssh
from launcher.transport.ssh.connect import connect
from launcher.transport.ssh.options import SshOptions
from launcher.transport.ssh.transport import SshTransport

TESTS = Path(__file__).resolve().parents[1]
HOST = Host("127.0.0.1", (0,))
AGENT = "harness.launch.echo_agent"


@pytest.fixture(
    params=["local", pytest.param("ssh", marks=pytest.mark.cluster), pytest.param("openssh", marks=pytest.mark.cluster)]
)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    made: Transport
    if request.param == "local":
        made = LocalTransport(module=AGENT, root=TESTS)
    else:
        options = SshOptions(ssh_config=request.getfixturevalue("sshd").ssh_config, agent_module=AGENT, root=TESTS)
        made = SshTransport(options) if request.param == "ssh" else OpenSshTransport(options)
    yield made
    made.close()


def read_all(channel: Channel) -> bytes:
    return b"".join(iter(lambda: channel.read(1 << 16), b""))


def test_fifty_megabytes_go_both_ways(transport: Transport) -> None:
    channel = transport.open(HOST)
    block = os.urandom(1 << 20)

    def send() -> None:
        channel.write(b"echo\n")
        for _ in range(50):
            channel.write(block)
        channel.close_stdin()

    sender = threading.Thread(target=send)
    sender.start()
    received = read_all(channel)
    sender.join()
    assert hashlib.sha256(received).digest() == hashlib.sha256(block * 50).digest()
    assert channel.wait(DEADLINE_S) == 0


def test_exit_status_and_last_words(transport: Transport) -> None:
    channel = transport.open(HOST)
    channel.write(b"exit 7\n")
    assert read_all(channel) == b""
    assert channel.wait(DEADLINE_S) == 7
    assert channel.stderr_tail() == "leaving as told"


def test_a_flood_on_stderr_blocks_nothing(transport: Transport) -> None:
    channel = transport.open(HOST)
    channel.write(b"noise\n")
    channel.close_stdin()
    assert read_all(channel) == b"done\n"
    assert channel.wait(DEADLINE_S) == 0
    assert channel.stderr_tail().splitlines()[-1].startswith("noise line 199999 ")


def test_writing_to_an_ended_agent_is_an_error(transport: Transport) -> None:
    channel = transport.open(HOST)
    channel.write(b"exit 0\n")
    assert channel.wait(DEADLINE_S) == 0
    with pytest.raises(TransportError, match=r"127\.0\.0\.1"):
        channel.write(b"x" * (64 << 20))


def test_close_frees_a_waiting_reader_and_is_idempotent(transport: Transport) -> None:
    channel = transport.open(HOST)
    channel.write(b"pid\n")
    pid, session, arguments = channel.read(1000).decode().split(" ", 2)
    assert session != str(os.getsid(0)), "a terminal's Ctrl-C would reach the agent"
    assert len(arguments.split()) == 1, "the agent must see no argument"
    reader = threading.Thread(target=channel.read, args=(1,))
    reader.start()
    channel.close()
    reader.join(DEADLINE_S)
    assert not reader.is_alive()
    channel.close()
    channel.close_stdin()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the far side to see the end of its stdin")


def test_a_killed_local_agent_shows_its_signal() -> None:
    transport = LocalTransport(module=AGENT, root=TESTS)
    channel = transport.open(HOST)
    channel.write(b"die\n")
    assert channel.wait(DEADLINE_S) == 128 + 9
    transport.close()


@pytest.mark.cluster
def test_a_killed_remote_agent_has_no_status(sshd: LoopbackSshd) -> None:
    transport = SshTransport(SshOptions(ssh_config=sshd.ssh_config, agent_module=AGENT, root=TESTS))
    channel = transport.open(HOST)
    channel.write(b"die\n")
    assert read_all(channel) == b""
    assert channel.wait(DEADLINE_S) is None
    transport.close()


def test_a_missing_package_is_explained() -> None:
    transport = LocalTransport(module="launcher.no_such_module")
    channel = transport.open(HOST)
    assert read_all(channel) == b""
    assert "launcher package is not" in str(start_failure(channel, None))
    transport.close()


@pytest.mark.cluster
def test_a_connection_that_is_made_while_the_transport_closes_is_ended(
    sshd: LoopbackSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = SshTransport(SshOptions(ssh_config=sshd.ssh_config, agent_module=AGENT, root=TESTS))
    made = []

    def connect_and_close(target: Any, via: Any) -> Any:
        made.append(connect(target, via))
        transport.close()
        return made[0]

    monkeypatch.setattr(ssh, "connect", connect_and_close)
    with pytest.raises(TransportError, match="closed while connecting"):
        transport.open(HOST)
    assert not made[0].is_active()


@pytest.mark.cluster
def test_a_missing_remote_python_is_explained(sshd: LoopbackSshd) -> None:
    transport = SshTransport(SshOptions(ssh_config=sshd.ssh_config, remote_python="/no such/python"))
    channel = transport.open(HOST)
    assert read_all(channel) == b""
    assert "python was not found" in str(start_failure(channel, None))
    transport.close()


@pytest.mark.cluster
def test_one_connection_serves_a_host_twice_and_many_hosts_open_at_once(sshd: LoopbackSshd) -> None:
    transport = SshTransport(SshOptions(ssh_config=sshd.ssh_config, agent_module=AGENT, root=TESTS))
    hosts = [Host(f"127.0.0.{number}", (0,)) for number in range(1, 9)]
    fleet = Fleet([AgentLink(host) for host in (*hosts, hosts[0])], lambda _: transport)
    fleet.connect()
    assert all(link.channel is not None and link.channel.host_name == link.name for link in fleet.links)
    assert len(transport._connections) == len(hosts)
    fleet.close()
    transport.close()


def test_every_failing_host_is_listed_and_the_others_are_closed() -> None:
    good = LocalTransport(module=AGENT, root=TESTS)
    opened: list[Channel] = []

    class Picky:
        name = "picky"

        def command_for(self, host: Host) -> str:
            return ""

        def open(self, host: Host) -> Channel:
            if host.name.startswith("bad"):
                raise TransportError("refused", where=host.name)
            opened.append(good.open(host))
            return opened[-1]

        def close(self) -> None:
            return None

    with pytest.raises(TransportError) as caught:
        Fleet([AgentLink(Host(name, (0,))) for name in ("bad-1", "good", "bad-2")], lambda _: Picky()).connect()
    assert [finding.where for finding in caught.value.diagnostics] == ["bad-1", "bad-2"]
    assert [channel.wait(DEADLINE_S) for channel in opened] == [128 + 9]


def test_open_files_are_allowed_for() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        allow_connections(7)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 300
        allow_connections(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(856, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_addresses_are_never_local() -> None:
    assert is_local("localhost")
    assert is_local(os.uname().nodename)
    assert not is_local("127.0.0.1")


def test_an_agent_that_cannot_be_watched_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread_left(_self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = descendants(os.getpid())
    monkeypatch.setattr(threading.Thread, "start", no_thread_left)
    with pytest.raises(TransportError, match="the agent cannot be watched: can't start new thread"):
        LocalTransport().open(Host("localhost", (0,)))
    monkeypatch.undo()
    assert descendants(os.getpid()) <= before
