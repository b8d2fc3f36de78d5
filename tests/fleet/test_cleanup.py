"""Lost hosts are asked whether anything is left: all at once, and nobody waits for long."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
from harness.launch.command import DEADLINE_S

from launcher.agent.wire import MAGIC, PROTOCOL_VERSION, Bye, Hello, encode
from launcher.base.errors import TransportError
from launcher.base.timeouts import Timeouts
from launcher.cluster.cluster import Host
from launcher.fleet import fleet
from launcher.fleet.fleet import sweep_lost_hosts


class Hosts:
    """A transport to hosts of which some are dead, and some never answer."""

    name = "fake"
    window_bytes = None

    def __init__(self, num_dead: int = 1) -> None:
        self.never = threading.Event()
        self._meeting = threading.Barrier(num_dead)

    def open(self, host: Host) -> Hosts:
        if host.name.startswith("dead"):
            self._meeting.wait(DEADLINE_S)  # all of them are asked before the first is given up
            raise TransportError("no answer", where=host.name)
        if host.name.startswith("mute"):
            self.never.wait()
        left = [4321] if host.name.startswith("stuck") else []
        self._data = [MAGIC + encode(Hello(PROTOCOL_VERSION)) + encode(Bye(left)), b""]
        return self

    def write(self, data: bytes) -> None: ...

    def read(self, _max_bytes: int) -> bytes:
        return self._data.pop(0)

    def close_stdin(self) -> None: ...

    def wait(self, _timeout_s: float) -> None: ...

    def close(self) -> None: ...


def names(*hosts: str) -> list[Host]:
    return [Host(name, (0,)) for name in hosts]


def test_dead_hosts_are_waited_for_all_at_once() -> None:
    dead = [f"dead-{number}" for number in range(20)]
    hosts, well = Hosts(len(dead)), Hosts()
    left = sweep_lost_hosts(names(*dead, "well"), lambda host: cast(Any, well if host.name == "well" else hosts), "job")
    assert left == tuple(dead)
    assert not hosts._meeting.broken


def test_a_host_that_could_not_end_a_process_is_not_clean() -> None:
    assert sweep_lost_hosts(names("well", "stuck"), lambda _host: cast(Any, Hosts()), "job") == ("stuck",)


def test_a_host_that_never_answers_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "timeouts", lambda: Timeouts(sweep_s=0.5))
    monkeypatch.setattr(fleet, "_EXPLAIN_AFTER_S", 0.2)
    told: list[str] = []
    hosts = Hosts()
    assert sweep_lost_hosts(names("mute", "well"), lambda _host: cast(Any, hosts), "job", told.append) == ("mute",)
    assert told == ["lost hosts to confirm that nothing is left there (Ctrl-C: do not wait): mute (fake), 1 of 2"]
    hosts.never.set()


def test_a_user_who_does_not_want_to_wait_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "timeouts", lambda: Timeouts(sweep_s=1e6))
    hosts = Hosts()
    assert sweep_lost_hosts(names("mute"), lambda _host: cast(Any, hosts), "job", is_cancelled=lambda: True) == (
        "mute",
    )
    hosts.never.set()
