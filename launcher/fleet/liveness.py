"""Which hosts have fallen silent, and whether it was the launcher that did not listen.

Agents end their ranks when they hear nothing for the length of the lease. A launcher that the user suspends (Ctrl-Z)
asks them to wait for longer. One that is stopped without a warning (SIGSTOP, a machine that sleeps) cannot: what it
finds when it comes back must not be blamed on the hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from launcher.agent.wire import Lease
from launcher.fleet.agent import Agent
from launcher.fleet.member import Member
from launcher.fleet.signals import wall_s

_ABSENCE_S = 3.0  # the main thread never waits for so long: the whole process was stopped
# While the user has suspended the launcher, agents wait for so long. They still notice its end at once.
_SUSPENDED_LEASE_S = 24 * 3600.0
_SUSPEND_WAIT_S = 2.0  # for agents to say that they know


class Liveness:
    """Watches the hosts of one fleet. For the main thread."""

    def __init__(self, members: Sequence[Member], lease_s: float) -> None:
        self._members = members
        self._lease_s = lease_s
        self._looked_s = wall_s()
        self._away_s = 0.0
        self._away_until_s = 0.0  # monotonic

    @property
    def away_s(self) -> float | None:
        """How long this process was stopped, as long as a lost host is a consequence of that; else None."""
        return self._away_s if time.monotonic() < self._away_until_s else None

    def begin(self) -> None:
        """Begin to watch: from now on the main thread asks `was_away` all the time."""
        self._looked_s = wall_s()

    def was_away(self) -> bool:
        """Whether this process was stopped since the last call, and forget the silence of that time."""
        now_s = wall_s()
        away_s, self._looked_s = now_s - self._looked_s, now_s
        if away_s < _ABSENCE_S:
            return False
        self._forget_silence()
        if away_s > self._lease_s:
            self._away_s, self._away_until_s = away_s, time.monotonic() + self._lease_s
        return True

    def silence_s(self, member: Member, now_s: float) -> float | None:
        """Return for how long a host has been silent if that is longer than the lease, else None. now_s: monotonic."""
        silence_s = now_s - member.last_heard_s
        return silence_s if member.has_lease and member.has_answered and silence_s > self._lease_s else None

    def suspended(
        self, stop: Callable[[], float], is_ready: Callable[[], bool], handle_event: Callable[[], None]
    ) -> float:
        """Stop this process without the loss of a rank, and return how long that was, in seconds.

        stop: stops the process until it is to continue. is_ready: nothing else has to be done before. handle_event:
        waits a moment for an event and handles it.
        """
        leased = [agent for agent in self._members if isinstance(agent, Agent) and agent.has_lease and not agent.ended]
        asked_s = time.monotonic()
        for agent in leased:
            agent.send(Lease(_SUSPENDED_LEASE_S))
        while time.monotonic() < asked_s + _SUSPEND_WAIT_S and not (
            is_ready() and all(agent.ended or agent.ponged_s > asked_s for agent in leased)
        ):
            handle_event()
        away_s = stop()
        self._looked_s = wall_s()
        self._forget_silence()
        for agent in leased:
            agent.send(Lease(self._lease_s))
        return away_s

    def _forget_silence(self) -> None:
        for member in self._members:
            member.last_heard_s = time.monotonic()
