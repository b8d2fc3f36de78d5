"""Which nodes have fallen silent, and whether it was the launcher that did not listen.

Agents end their ranks when they hear nothing for the length of the lease. A launcher that the user suspends (Ctrl-Z)
tells them to wait for longer. One that is stopped without a warning (SIGSTOP, a machine that sleeps) cannot: what it
finds when it comes back must not be blamed on the hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from launcher.agent.wire import Lease
from launcher.job.node import Node
from launcher.job.signals import wall_s

_ABSENCE_S = 3.0  # the controller never waits for so long: the whole process was stopped
# While the user has suspended the launcher, agents wait for so long. They still notice its end at once.
_SUSPENDED_LEASE_S = 24 * 3600.0
_SUSPEND_WAIT_S = 2.0  # for agents to say that they know


class Liveness:
    """Watches the nodes of one run. For the controller's thread."""

    def __init__(self, lease_s: float) -> None:
        self.nodes: Sequence[Node] = ()
        self._lease_s = lease_s
        self._looked_s = wall_s()
        self._away_s = 0.0
        self._away_until_s = 0.0  # monotonic

    @property
    def away_s(self) -> float | None:
        """How long this process was stopped, as long as a lost node is a consequence of that; else None."""
        return self._away_s if time.monotonic() < self._away_until_s else None

    def watch(self, nodes: Sequence[Node]) -> None:
        """Begin to watch."""
        self.nodes = nodes
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

    def silent_nodes(self, now_s: float) -> list[tuple[Node, float]]:
        """Return the nodes that have said nothing for longer than the lease, and for how long. now_s: monotonic."""
        silences = [(node, now_s - node.last_heard_s) for node in self.nodes if node.has_lease and not node.ended]
        return [(node, silence_s) for node, silence_s in silences if silence_s > self._lease_s]

    def suspended(
        self, stop: Callable[[], float], is_ready: Callable[[], bool], handle_event: Callable[[], None]
    ) -> float:
        """Stop this process without the loss of a rank, and return how long that was, in seconds.

        stop: stops the process until it is to continue. is_ready: nothing else has to be done before. handle_event:
        waits a moment for an event and handles it.
        """
        leased = [node for node in self.nodes if node.has_lease and not node.ended]
        asked_s = time.monotonic()
        for node in leased:
            node.send(Lease(_SUSPENDED_LEASE_S))
        while time.monotonic() < asked_s + _SUSPEND_WAIT_S and not (
            is_ready() and all(node.ended or node.ponged_s > asked_s for node in leased)
        ):
            handle_event()
        away_s = stop()
        self._looked_s = wall_s()
        self._forget_silence()
        for node in leased:
            node.send(Lease(self._lease_s))
        return away_s

    def _forget_silence(self) -> None:
        for node in self.nodes:
            node.last_heard_s = time.monotonic()
