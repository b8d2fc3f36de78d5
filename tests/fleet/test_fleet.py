"""What every policy on a fleet relies on: who is asked to stop, who is given up, and that a host ends once."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, cast

import pytest
from harness.launch.command import DEADLINE_S

from launcher.agent.wire import MAGIC, PROTOCOL_VERSION, Bye, Decoder, Hello, Message, Ping, Pong, Stop, encode
from launcher.base.errors import TransportError
from launcher.base.timeouts import timeouts
from launcher.cluster.cluster import Host
from launcher.fleet.agent_link import AgentLink
from launcher.fleet.fleet import Fleet
from launcher.fleet.host_link import NEVER_CONNECTED, HostEnded


class Wire:
    """A transport and channel to one agent that says what the test puts into `said`; `never` hosts do not connect."""

    name = "fake"
    window_bytes = None
    host_name = "host"

    def __init__(self) -> None:
        self.said: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.closed, self.never = threading.Event(), threading.Event()
        self._decoder = Decoder(expect_magic=False)
        self.say(Hello(PROTOCOL_VERSION), MAGIC)

    def say(self, message: Message, before: bytes = b"") -> None:
        self.said.put(before + encode(message))

    def open(self, host: Host) -> Wire:
        if host.name == "never":
            self.never.wait()
        return self

    def read(self, _max_bytes: int) -> bytes:
        return self.said.get()

    def write(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self.heard.put(message)

    def close_stdin(self) -> None: ...

    def wait(self, _timeout_s: float) -> None: ...

    def stderr_tail(self) -> str:
        return ""

    def close(self) -> None:
        self.closed.set()
        self.said.put(b"")


def fleet_of(wire: Wire, *names: str, **options: Any) -> Fleet[AgentLink]:
    return Fleet([AgentLink(Host(name, (0,))) for name in names], lambda _: cast(Any, wire), **options)


def next_end(fleet: Fleet[AgentLink]) -> tuple[str, str]:
    """Return name and reason of the next host that ends."""
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        found = fleet.get(0.1)
        if found is not None and isinstance(found[1], HostEnded):
            return found[0].name, str(found[1].error)
    raise AssertionError("no host has ended")


def test_a_stop_asks_those_that_are_connected_and_ends_the_others() -> None:
    wire = Wire()
    fleet = fleet_of(wire, "well", "never")
    fleet.start()
    fleet.wait(lambda agent: agent.has_answered, links=fleet.links[:1])
    assert fleet.stop(5.0)
    assert next_end(fleet) == ("never", NEVER_CONNECTED)
    graces_s = (5.0, 9.0, 0.0, 5.0)
    assert [fleet.stop(grace_s) for grace_s in graces_s] == [False, False, True, False], "only a shorter grace counts"
    assert [wire.heard.get(timeout=DEADLINE_S), wire.heard.get(timeout=DEADLINE_S)] == [Stop(5.0), Stop(0.0)]
    wire.say(Bye())
    wire.said.put(b"")
    assert next_end(fleet) == ("well", "None")
    assert fleet.is_over
    wire.never.set()


def test_a_longer_grace_does_not_put_off_the_moment_at_which_hosts_are_given_up() -> None:
    wire = Wire()
    fleet = fleet_of(wire, "well", goodbye_s=0.0)
    fleet.start()
    fleet.wait(lambda agent: agent.has_answered)
    fleet.stop(1.0)
    fleet.stop(600.0)
    assert fleet.overdue(time.monotonic()) == []
    assert fleet.overdue(time.monotonic() + 300.0) == fleet.links
    assert wire.closed.is_set()


def test_an_agent_on_this_machine_that_does_not_answer_a_stop_is_given_up_before_the_goodbye() -> None:
    wire = Wire()
    wire.name = "local"
    fleet = fleet_of(wire, "mute", goodbye_s=600.0)
    fleet.start()
    fleet.wait(lambda agent: agent.has_answered)
    fleet.stop(5.0)
    assert [wire.heard.get(timeout=DEADLINE_S), wire.heard.get(timeout=DEADLINE_S)] == [Stop(5.0), Ping()]
    soon_s = time.monotonic() + 5.0 + timeouts().local_answer_s
    assert fleet.overdue(soon_s - 1.0) == []
    wire.say(Pong(0.0))
    deadline_s = time.monotonic() + 10
    while fleet.links[0].ponged_s == 0.0 and time.monotonic() < deadline_s:
        fleet.get(0.05)
    assert fleet.overdue(soon_s + 1.0) == [], "it answers, and may take its time"
    fleet.links[0].ponged_s = 0.0
    assert fleet.overdue(soon_s + 1.0) == fleet.links


def test_a_host_that_does_not_end_in_time_is_given_up_once() -> None:
    wire = Wire()
    fleet = fleet_of(wire, "mute", goodbye_s=1.0)
    fleet.connect()
    fleet.stop(2.0)
    assert fleet.overdue(time.monotonic() + 2.5) == []
    assert fleet.overdue(time.monotonic() + 3.5) == fleet.links
    assert wire.closed.is_set()
    assert fleet.is_over
    assert fleet.overdue(time.monotonic() + 3.5) == []
    assert fleet.get(1.0) is None, "the end of its stream is no second end of the host"


def test_a_silent_host_is_lost_and_one_that_never_answered_too() -> None:
    wire = Wire()
    fleet = fleet_of(wire, "silent", lease_s=5.0)
    fleet.connect()
    fleet.wait(lambda agent: agent.has_answered)
    assert fleet.lost(time.monotonic() + 4.0) == []
    ((_, error),) = fleet.lost(time.monotonic() + 6.0)
    assert str(error) == "no heartbeat for 6 s"
    other = Wire()
    other.said = queue.SimpleQueue()
    mute = fleet_of(other, "mute")
    mute.connect()
    ((_, error),) = mute.lost(time.monotonic() + timeouts().answer_s + 1.0)
    assert str(error) == f"no answer within {timeouts().answer_s:g} s"


def test_a_wait_for_an_answer_ends_when_the_host_is_lost() -> None:
    wire = Wire()
    fleet = fleet_of(wire, "lost")
    fleet.connect()
    fleet.wait(lambda agent: agent.has_answered)
    wire.said.put(b"")
    with pytest.raises(TransportError, match="lost: the agent ended or the connection was lost"):
        fleet.wait(lambda agent: agent.picked is not None, "a free port", limit_s=20.0)


def test_hosts_that_do_not_answer_in_time_are_named_one_by_one() -> None:
    fleet = fleet_of(Wire(), "b", "c")
    fleet.connect()
    with pytest.raises(TransportError) as caught:
        fleet.wait(lambda agent: agent.picked is not None, "a free port", limit_s=0.01)
    assert [finding.where for finding in caught.value.diagnostics] == ["b", "c"]


def test_hosts_that_end_before_they_answer_are_named_together() -> None:
    wires = {"first": Wire(), "second": Wire()}
    for wire in wires.values():
        wire.said = queue.SimpleQueue()
    fleet = Fleet([AgentLink(Host(name, (0,))) for name in wires], lambda host: cast(Any, wires[host.name]))
    wires["first"].said.put(b"")
    fleet.start()
    fleet.wait(lambda agent: agent.ended, links=fleet.links[:1])
    fleet.wait(lambda agent: agent.channel is not None)
    wires["second"].said.put(b"")
    with pytest.raises(TransportError) as caught:
        fleet.wait(lambda agent: agent.has_answered)
    assert [finding.where for finding in caught.value.diagnostics] == ["host", "host"]
