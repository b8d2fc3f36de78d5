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
from launcher.fleet.agent import Agent
from launcher.fleet.member import MAX_PARALLEL, NEVER_CONNECTED, Event, HostEnded, Member, Turns
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


# ---- Many hosts at once ----


M = TypeVar("M", bound=Member)

_EXPLAIN_AFTER_S = 2.0  # a wait longer than this is explained to the user
_MAX_NAMES_CHARS = 80
_POLL_S = 0.1


class Fleet(Generic[M]):
    """The hosts of one run. Use once; all methods but `wake` are for one thread."""

    def __init__(
        self,
        members: Sequence[M],
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
        self.members = list(members)
        self.liveness = Liveness(self.members, lease_s)
        self._transport_for = transport_for
        self._goodbye_s = goodbye_s
        self._on_waiting = on_waiting
        self._is_interrupted = is_interrupted
        # SimpleQueue.put may be called from a signal handler, which queue.Queue forbids.
        self._events: queue.SimpleQueue[tuple[M, Event] | None] = queue.SimpleQueue()
        self._turns = Turns(1)
        self._grace_s = math.inf  # of the last stop
        self._stopped_s = self._kill_at_s = math.inf  # monotonic, of the first stop, and when its grace ends
        self._give_up_at_s = math.inf  # monotonic
        self._explain_at_s = math.inf
        self._findings: dict[M, Sequence[Diagnostic]] = {}  # why hosts ended while they were waited for

    @property
    def running(self) -> list[M]:
        """The hosts that have not ended."""
        return [member for member in self.members if not member.ended]

    @property
    def is_over(self) -> bool:
        """Whether all hosts have ended."""
        return all(member.ended for member in self.members)

    # ---- start ----

    def start(self) -> None:
        """Begin to connect to all hosts, each on a thread of its own. Raises: UsageError."""
        self._turns = Turns(MAX_PARALLEL)
        self._explain_at_s = time.monotonic() + _EXPLAIN_AFTER_S
        for member in self.members:
            work = (self._transport_for, self._turns, functools.partial(self._put, member))
            in_context = contextvars.copy_context().run
            threading.Thread(
                target=in_context, args=(member.serve, *work), name=f"host-{member.name}", daemon=True
            ).start()

    def connect(self) -> None:
        """Connect to all hosts, and wait until all channels are open; when this raises, none stays open.

        Raises: TransportError with one finding for each host that failed, or another LauncherError of one host.
        """
        try:
            self.start()
            self.wait(lambda member: member.channel is not None)
        except BaseException:  # no host may keep an agent without a launcher
            self.close()
            raise

    def wait(
        self,
        is_ready: Callable[[M], bool],
        what: str = "",
        members: Sequence[M] | None = None,
        limit_s: float = math.inf,
    ) -> None:
        """Wait until `is_ready` holds for all `members` (None: all hosts). It is asked after each event of a host.

        what: is waited for, beside the hosts. limit_s: for how long at most.
        Raises: TransportError with one finding for each host that has ended, unless all of them were ready before: then
        the next `wait` raises it, so that hosts which end for the same reason are named together. What
        `is_interrupted` raises.
        """
        wanted = dict.fromkeys(members or self.members)
        missing = dict.fromkeys(member for member in wanted if not (member.ended or is_ready(member)))
        start_s = time.monotonic()
        self._explain_at_s = start_s + _EXPLAIN_AFTER_S
        while missing:
            found = self.get(_POLL_S)
            if found is not None:
                member, event = found
                if isinstance(event, HostEnded):
                    self._findings[member] = _diagnostics(member, event.error)
                if member.ended or is_ready(member):
                    missing.pop(member, None)
            self._is_interrupted()
            if missing and time.monotonic() - start_s > limit_s:
                names = ", ".join(member.name for member in missing)
                raise TransportError(f"no answer after {limit_s:g} s while waiting for {what}", where=names)
            self.explain_wait(missing, what)
        if any(member not in wanted or not is_ready(member) for member in self._findings):
            ended = [member for member in self.members if member in self._findings]
            raise TransportError.from_diagnostics([one for member in ended for one in self._findings[member]])

    def explain_wait(self, members: Iterable[M], what: str = "") -> None:
        """Say which hosts are waited for, once, when it takes long: `node-[3-5] (ssh), 3 of 16`."""
        waiting = list(members) if time.monotonic() > self._explain_at_s else []
        if waiting:
            from launcher.cluster.nodeset import fold  # a job that need not wait does without

            self._explain_at_s = math.inf
            names = fold([member.name for member in waiting])
            names = names if len(names) <= _MAX_NAMES_CHARS else names[:_MAX_NAMES_CHARS] + "…"
            transport = f" ({waiting[0].transport})" if waiting[0].channel is None and waiting[0].transport else ""
            where = f"{names}{transport}, {len(waiting)} of {len(self.members)}"
            self._on_waiting(f"{what}: {where}" if what else where)

    # ---- events ----

    def get(self, timeout_s: float) -> tuple[M, Event] | None:
        """Return the next event of a host, None after `timeout_s` or a wake-up.

        A channel whose host has ended in another way than it should is closed: an agent that talks nonsense may live.
        """
        self._turns.free_slow()
        try:
            found = self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if found is None:
            return None
        member, event = found
        member.slots.release()
        if member.ended:
            return None
        if isinstance(event, HostEnded):
            if event.error is not None and not isinstance(event.error, (LauncherError, OSError)):
                raise event.error
            self._drop(member, keeps_channel=member.exited_cleanly)
        return member, event

    def wake(self) -> None:
        """Let a waiting `get` return None. Safe in a signal handler."""
        self._events.put(None)

    def lost(self, now_s: float) -> list[tuple[M, TransportError]]:
        """Return, once, the hosts that are silent for too long, and why; their channels are closed."""
        found: list[tuple[M, TransportError]] = []
        for member in self.running:
            silence_s = self.liveness.silence_s(member, now_s)
            is_mute = member.channel is not None and not member.has_answered
            if silence_s is not None:
                found.append((member, TransportError(f"no heartbeat for {silence_s:.0f} s")))
            elif is_mute and now_s - member.opened_s > timeouts().answer_s:
                found.append((member, TransportError(f"no answer within {timeouts().answer_s:g} s")))
        for member, _ in found:
            self._drop(member)
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
        for member in self.running:
            if member.cancel() is None:
                self._put(member, HostEnded(TransportError(NEVER_CONNECTED)))
            else:
                member.stop(grace_s)
        return True

    def overdue(self, now_s: float) -> list[M]:
        """Return, once, the hosts that have not ended in time after `stop`. Closed channels end their agents' lease.

        An agent on this machine that does not answer at all, as it was suspended, gets no longer than the ranks.
        """
        is_late, is_due = now_s > self._give_up_at_s, now_s > self._kill_at_s + timeouts().local_answer_s
        if not (is_late or is_due):
            return []
        late = [member for member in self.running if is_late or member.is_mute_since(self._stopped_s)]
        for member in late:
            self._drop(member)
        return late

    def close(self, wait_s: float = 0.0, is_to_leave: Callable[[], bool] = lambda: False) -> None:
        """Release every channel: also when something failed half-way, nothing may stay behind.

        wait_s: for agents to end by themselves, all together; those that have no ranks need not be waited for.
        is_to_leave: the user does not want to wait.
        """
        for member in self.members:
            member.hang_up()
        deadline_s = time.monotonic() + wait_s
        for member in self.members:
            channel = member.cancel()
            if channel is None:
                continue
            asked_s = time.monotonic()
            while not member.ended and asked_s < deadline_s and channel.wait(_POLL_S) is None:
                before_s, asked_s = asked_s, time.monotonic()
                if is_to_leave() or asked_s - before_s < _POLL_S / 2:  # it has ended, and nothing says how
                    break
            channel.close()

    def _put(self, member: M, event: Event) -> None:
        member.slots.acquire()
        self._events.put((member, event))

    def _drop(self, member: M, *, keeps_channel: bool = False) -> None:
        member.ended = True
        if member.channel is not None and not keeps_channel:
            member.channel.close()


def _diagnostics(member: Member, error: Exception | None) -> Sequence[Diagnostic]:
    """Return why a host ended before it was ready. Raises: an error that is not about hosts."""
    if not isinstance(error, LauncherError):
        return [Diagnostic(str(error or "the agent ended"), member.name)]
    if not isinstance(error, (TransportError, ProtocolError)):
        raise error
    return [Diagnostic(one.message, one.where or member.name, one.hint, one.shared) for one in error.diagnostics]


# ---- Lost hosts ----


def sweep_lost_hosts(
    hosts: Sequence[Host],
    transport_for: Callable[[Host], Transport],
    job_id: str,
    on_waiting: Callable[[str], object] = lambda _: None,
    is_to_leave: Callable[[], bool] = lambda: False,
) -> tuple[str, ...]:
    """Start a new agent on each host to kill what carries the job's id. Returns the hosts that could not confirm it.

    The ranks died with their agent (PDEATHSIG), or end with its lease; this finds what they had started. All hosts are
    asked at the same time. on_waiting: called once, after 2 s. is_to_leave: the user does not want to wait.
    """
    if not hosts:
        return ()
    agents = [Agent(host) for host in hosts]
    for agent in agents:
        agent.send(Sweep(job_id))
    fleet = Fleet(agents, transport_for, on_waiting=on_waiting)
    fleet.start()
    give_up_at_s = time.monotonic() + timeouts().sweep_s
    while not fleet.is_over and not is_to_leave() and time.monotonic() < give_up_at_s:
        fleet.get(_POLL_S)
        fleet.explain_wait(fleet.running, "lost hosts to confirm that nothing is left there (Ctrl-C: do not wait)")
    fleet.close()
    # One that names processes could not end them.
    clean = {agent.name for agent in agents if agent.ended and agent.exited_cleanly and not agent.left_pids}
    return tuple(host.name for host in hosts if host.name not in clean)
