"""Many hosts at once: a thread connects and reads each of them, the main thread gets their events and decides.

A run, `launch exec` and `launch check` are policies on it: what they start, and what an event means to them, is theirs.
No wait here is for one host: a channel that is no longer wanted is closed when it opens.
"""

from __future__ import annotations

import contextvars
import functools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from launcher.agent.wire import Lease, Sweep
from launcher.base.errors import Diagnostic, LauncherError, ProtocolError, TransportError
from launcher.base.timeouts import timeouts
from launcher.cluster.cluster import Host
from launcher.fleet.agent_link import AgentLink
from launcher.fleet.host_link import MAX_PARALLEL, NEVER_CONNECTED, ConnectSlots, Event, HostEnded, HostLink
from launcher.fleet.signals import wall_s
from launcher.transport.api import Transport

# ---- Which hosts have fallen silent, and whether it was the launcher that did not listen ----
# Agents end their ranks when they hear nothing for the length of the lease. A launcher that the user suspends
# (Ctrl-Z) asks them to wait for longer. One that is stopped without a warning (SIGSTOP, a machine that sleeps)
# cannot: what it finds when it comes back must not be blamed on the hosts.


_ABSENCE_S = 3.0  # the main thread never waits for so long: the whole process was stopped
# While the user has suspended the launcher, agents wait for so long. They still notice its end at once.
_SUSPENDED_LEASE_S = 24 * 3600.0
_SUSPEND_WAIT_S = 2.0  # for agents to say that they know


class Liveness:
    """Watches the hosts of one fleet. For the main thread."""

    def __init__(self, links: Sequence[HostLink], lease_s: float) -> None:
        self._links = links
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

    def silence_s(self, link: HostLink, now_s: float) -> float | None:
        """Return for how long a host has been silent if that is longer than the lease, else None. now_s: monotonic."""
        silence_s = now_s - link.last_heard_s
        return silence_s if link.has_lease and link.has_answered and silence_s > self._lease_s else None

    def suspended(
        self, stop: Callable[[], float], is_ready: Callable[[], bool], handle_event: Callable[[], None]
    ) -> float:
        """Stop this process without the loss of a rank, and return how long that was, in seconds.

        stop: stops the process until it is to continue. is_ready: nothing else has to be done before. handle_event:
        waits a moment for an event and handles it.
        """
        leased = [
            agent for agent in self._links if isinstance(agent, AgentLink) and agent.has_lease and not agent.ended
        ]
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
        for link in self._links:
            link.last_heard_s = time.monotonic()


# ---- Many hosts at once ----


L = TypeVar("L", bound=HostLink)

_EXPLAIN_AFTER_S = 2.0  # a wait longer than this is explained to the user
_MAX_NAMES_CHARS = 80
_POLL_S = 0.1


class Fleet(Generic[L]):
    """The hosts of one run. Use once; all methods but `wake` are for one thread."""

    def __init__(
        self,
        links: Sequence[L],
        transport_for: Callable[[Host], Transport],
        *,
        lease_s: float = math.inf,
        goodbye_s: float = 0.0,
        on_waiting: Callable[[str], object] = lambda _: None,
        is_interrupted: Callable[[], object] = lambda: None,
    ) -> None:
        """Connect to nothing yet.

        lease_s: a longer silence of a host with a lease means that it is lost. goodbye_s: how long a host may take to
        end after the grace of a stop. on_waiting: called after 2 s of a wait, once, with what is waited for.
        is_interrupted: called a few times a second in each `wait`; what it raises ends the wait at once.
        """
        self.links = list(links)
        self.liveness = Liveness(self.links, lease_s)
        self._transport_for = transport_for
        self._goodbye_s = goodbye_s
        self._on_waiting = on_waiting
        self._is_interrupted = is_interrupted
        # SimpleQueue.put may be called from a signal handler, which queue.Queue forbids.
        self._events: queue.SimpleQueue[tuple[L, Event] | None] = queue.SimpleQueue()
        self._slots = ConnectSlots(1)
        self._grace_s = math.inf  # of the last stop
        self._stopped_s = self._kill_at_s = math.inf  # monotonic, of the first stop, and when its grace ends
        self._give_up_at_s = math.inf  # monotonic
        self._explain_at_s = math.inf
        self._findings: dict[L, Sequence[Diagnostic]] = {}  # why hosts ended while they were waited for

    @property
    def running(self) -> list[L]:
        """The hosts that have not ended."""
        return [link for link in self.links if not link.ended]

    @property
    def is_over(self) -> bool:
        """Whether all hosts have ended."""
        return all(link.ended for link in self.links)

    # ---- start ----

    def start(self) -> None:
        """Begin to connect to all hosts, each on a thread of its own. Raises: UsageError."""
        self._slots = ConnectSlots(MAX_PARALLEL)
        self._explain_at_s = time.monotonic() + _EXPLAIN_AFTER_S
        for link in self.links:
            work = (self._transport_for, self._slots, functools.partial(self._put, link))
            in_context = contextvars.copy_context().run
            threading.Thread(target=in_context, args=(link.serve, *work), name=f"host-{link.name}", daemon=True).start()

    def connect(self) -> None:
        """Connect to all hosts, and wait until all channels are open; when this raises, none stays open.

        Raises: TransportError with one finding for each host that failed, or another LauncherError of one host.
        """
        try:
            self.start()
            self.wait(lambda link: link.channel is not None)
        except BaseException:  # no host may keep an agent without a launcher
            self.close()
            raise

    def wait(
        self,
        is_ready: Callable[[L], bool],
        what: str = "",
        links: Sequence[L] | None = None,
        limit_s: float = math.inf,
    ) -> None:
        """Wait until `is_ready` holds for all `links` (None: all hosts). It is asked after each event of a host.

        what: is waited for, beside the hosts. limit_s: for how long at most.
        Raises: TransportError with one finding for each host that has ended, unless all of them were ready before: then
        the next `wait` raises it, so that hosts which end for the same reason are named together. What
        `is_interrupted` raises.
        """
        wanted = dict.fromkeys(links or self.links)
        missing = dict.fromkeys(link for link in wanted if not (link.ended or is_ready(link)))
        start_s = time.monotonic()
        self._explain_at_s = start_s + _EXPLAIN_AFTER_S
        while missing:
            found = self.get(_POLL_S)
            if found is not None:
                link, event = found
                if isinstance(event, HostEnded):
                    self._findings[link] = _diagnostics(link, event.error)
                if link.ended or is_ready(link):
                    missing.pop(link, None)
            self._is_interrupted()
            if missing and time.monotonic() - start_s > limit_s:
                message = f"no answer after {limit_s:g} s while waiting for {what}"
                # One for each: a restart leaves out the hosts that are named.
                raise TransportError.from_diagnostics([Diagnostic(message, link.name) for link in missing])
            self.explain_wait(missing, what)
        if any(link not in wanted or not is_ready(link) for link in self._findings):
            ended = [link for link in self.links if link in self._findings]
            raise TransportError.from_diagnostics([one for link in ended for one in self._findings[link]])

    def explain_wait(self, links: Iterable[L], what: str = "") -> None:
        """Say which hosts are waited for, once, when it takes long: `node-[3-5] (ssh), 3 of 16`."""
        waiting = list(links) if time.monotonic() > self._explain_at_s else []
        if waiting:
            from launcher.cluster.nodeset import fold  # a job that need not wait does without

            self._explain_at_s = math.inf
            names = fold([link.name for link in waiting])
            names = names if len(names) <= _MAX_NAMES_CHARS else names[:_MAX_NAMES_CHARS] + "…"
            transport = f" ({waiting[0].transport})" if waiting[0].channel is None and waiting[0].transport else ""
            where = f"{names}{transport}, {len(waiting)} of {len(self.links)}"
            self._on_waiting(f"{what}: {where}" if what else where)

    # ---- events ----

    def get(self, timeout_s: float) -> tuple[L, Event] | None:
        """Return the next event of a host, None after `timeout_s` or a wake-up.

        A channel whose host has ended in another way than it should is closed: an agent that talks nonsense may live.
        """
        self._slots.free_slow()
        try:
            found = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if found is None:
            return None
        link, event = found
        link.unhandled.release()
        if link.ended:
            return None
        if isinstance(event, HostEnded):
            if event.error is not None and not isinstance(event.error, (LauncherError, OSError)):
                raise event.error
            self._drop(link, keeps_channel=link.exited_cleanly)
        return link, event

    def wake(self) -> None:
        """Let a waiting `get` return None. Safe in a signal handler."""
        self._events.put(None)

    def lost(self, now_s: float) -> list[tuple[L, TransportError]]:
        """Return, once, the hosts that are silent for too long, and why; their channels are closed."""
        found: list[tuple[L, TransportError]] = []
        for link in self.running:
            silence_s = self.liveness.silence_s(link, now_s)
            is_mute = link.channel is not None and not link.has_answered
            if silence_s is not None:
                found.append((link, TransportError(f"no heartbeat for {silence_s:.0f} s")))
            elif is_mute and now_s - link.opened_s > timeouts().answer_s:
                found.append((link, TransportError(f"no answer within {timeouts().answer_s:g} s")))
        for link, _ in found:
            self._drop(link)
        return found

    # ---- stop ----

    def stop(self, grace_s: float) -> bool:
        """Ask every host to end what it runs; only a shorter grace than before counts. Returns whether it did.

        Hosts that are not connected yet end at once.
        """
        if grace_s >= self._grace_s:
            return False
        self._grace_s, now_s = grace_s, time.monotonic()
        self._stopped_s = min(self._stopped_s, now_s)
        self._kill_at_s = min(self._kill_at_s, now_s + grace_s)
        self._give_up_at_s = min(self._give_up_at_s, now_s + grace_s + self._goodbye_s)
        for link in self.running:
            if link.cancel() is None:
                self._put(link, HostEnded(TransportError(NEVER_CONNECTED)))
            else:
                link.stop(grace_s)
        return True

    def overdue(self, now_s: float) -> list[L]:
        """Return, once, the hosts that have not ended in time after `stop`. Closed channels end their agents' lease.

        An agent on this machine that does not answer at all, as it was suspended, gets no longer than the ranks.
        """
        is_late, is_due = now_s > self._give_up_at_s, now_s > self._kill_at_s + timeouts().local_answer_s
        if not (is_late or is_due):
            return []
        late = [link for link in self.running if is_late or link.is_mute_since(self._stopped_s)]
        for link in late:
            self._drop(link)
        return late

    def close(self, wait_s: float = 0.0, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Release every channel: also when something failed half-way, nothing may stay behind.

        wait_s: for agents to end by themselves, all together; those that have no ranks need not be waited for.
        is_cancelled: the user does not want to wait.
        """
        for link in self.links:
            link.hang_up()
        deadline_s = time.monotonic() + wait_s
        for link in self.links:
            channel = link.cancel()
            if channel is None:
                continue
            asked_s = time.monotonic()
            while not link.ended and asked_s < deadline_s and channel.wait(_POLL_S) is None:
                before_s, asked_s = asked_s, time.monotonic()
                if is_cancelled() or asked_s - before_s < _POLL_S / 2:  # it has ended, and nothing says how
                    break
            channel.close()

    def _put(self, link: L, event: Event) -> None:
        link.unhandled.acquire()
        self._events.put((link, event))

    def _drop(self, link: L, *, keeps_channel: bool = False) -> None:
        link.ended = True
        if link.channel is not None and not keeps_channel:
            link.channel.close()


def _diagnostics(link: HostLink, error: Exception | None) -> Sequence[Diagnostic]:
    """Return why a host ended before it was ready. Raises: an error that is not about hosts."""
    if not isinstance(error, LauncherError):
        return [Diagnostic(str(error or "the agent ended"), link.name)]
    if not isinstance(error, (TransportError, ProtocolError)):
        raise error
    return [Diagnostic(one.message, one.where or link.name, one.hint, one.shared) for one in error.diagnostics]


# ---- Lost hosts ----


def sweep_lost_hosts(
    hosts: Sequence[Host],
    transport_for: Callable[[Host], Transport],
    job_id: str,
    on_waiting: Callable[[str], object] = lambda _: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> tuple[str, ...]:
    """Start a new agent on each host to kill what carries the job's id. Returns the hosts that could not confirm it.

    The ranks died with their agent (PDEATHSIG), or end with its lease; this finds what they had started. All hosts are
    asked at the same time. on_waiting: called once, after 2 s. is_cancelled: the user does not want to wait.
    """
    if not hosts:
        return ()
    agents = [AgentLink(host) for host in hosts]
    for agent in agents:
        agent.send(Sweep(job_id))
    fleet = Fleet(agents, transport_for, on_waiting=on_waiting)
    fleet.start()
    give_up_at_s = time.monotonic() + timeouts().sweep_s
    while not fleet.is_over and not is_cancelled() and time.monotonic() < give_up_at_s:
        fleet.get(_POLL_S)
        fleet.explain_wait(fleet.running, "lost hosts to confirm that nothing is left there (Ctrl-C: do not wait)")
    fleet.close()
    # One that names processes could not end them.
    clean = {agent.name for agent in agents if agent.ended and agent.exited_cleanly and not agent.left_pids}
    return tuple(host.name for host in hosts if host.name not in clean)
