"""Run one program on every host at once and keep what each printed.

A job stops at its first failure; here every host is on its own. A host that cannot be reached is a result like any
other. How a host runs the program is its session's matter: under an ordinary agent (`job.supervised`), or under a
plain shell (`job.bare`). Either way environment and arguments travel inside the stream.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from launcher.base import env
from launcher.base.errors import Diagnostic, LauncherError, TransportError
from launcher.base.timeouts import timeouts
from launcher.cluster.cluster import Host
from launcher.job.plan import DEFAULT_LEASE_S
from launcher.job.signals import SignalQueue
from launcher.transport.api import Channel, Transport
from launcher.transport.fanout import NEVER_CONNECTED, TELL_AFTER_S, Opening, Turns, max_parallel, waiting_text

MAX_OUTPUT_BYTES = 64 << 20  # of one host; what follows is dropped, and the result says so
MAX_HELD_BYTES = 512 << 20  # of all hosts together, as long as nobody has taken it
GRACE_S = 5.0  # between SIGTERM and SIGKILL
READ_BYTES = 1 << 18
FOLDER_HINT = "run this from a folder that every host has, such as /"
_HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Task:
    """What one host is to run."""

    host: Host
    command: tuple[str, ...]  # as the session wants it; for agents what launcher.worker takes: kind, target, arguments
    cwd: str


@dataclass
class HostResult:
    """What one host did; complete once `run` has returned it."""

    host: Host
    transport: str = ""  # name of what reaches it
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    is_cut: bool = False  # it printed more than MAX_OUTPUT_BYTES, or than was left of MAX_HELD_BYTES
    exit_code: int | None = None  # as a shell shows it; None: it never ran, or its end is not known
    error: Diagnostic | None = None  # why there is no exit code
    connect_s: float | None = None  # until the agent's process was started
    round_trip_s: float | None = None  # one question and its answer
    started_s: float | None = None  # wall clock of this machine when the program was asked to start ...
    answered_s: float | None = None  # ... and when its first output came
    port: int | None = None  # one that was free on the host


class Held:
    """How much output of all hosts is kept in memory. Safe from several threads."""

    def __init__(self) -> None:
        self._num_bytes = 0
        self._lock = threading.Lock()

    def take(self, wanted_bytes: int) -> int:
        """Return how many of `wanted_bytes` more may be kept, and count them."""
        with self._lock:
            granted_bytes = max(0, min(wanted_bytes, MAX_HELD_BYTES - self._num_bytes))
            self._num_bytes += granted_bytes
        return granted_bytes

    def drop(self, result: HostResult) -> None:
        """Forget the output of a host that has ended."""
        with self._lock:
            self._num_bytes -= len(result.stdout) + len(result.stderr)
        result.stdout.clear()
        result.stderr.clear()


class Listener:
    """Called during a run, on the thread of `Everywhere.run`; this one does nothing."""

    def ended(self, result: HostResult) -> None:
        """Take the result of a host, which is complete."""

    def turn(self) -> None:
        """Use the time between two events; called at least a few times a second."""


class Session(ABC):
    """One host: a channel and the thread that reads it. Subclasses know what is at its far end."""

    def __init__(self, number: int, task: Task, job_id: str) -> None:
        self.result = HostResult(task.host)
        self.opening = Opening(task.host)
        self.has_answered = False
        self.number = number
        self.task = task
        self.job_id = job_id
        self.held = Held()  # `Everywhere` puts one there for all its sessions

    @property
    def channel(self) -> Channel | None:
        """What leads to the host, once it is connected."""
        return self.opening.channel

    @property
    def is_lost(self) -> bool:
        """True when something may be left on the host and nobody there ends it."""
        return False

    @property
    def silent_since_s(self) -> float | None:
        """When the far end last said something (monotonic); None where silence means nothing."""
        return None

    @abstractmethod
    def follow(self, channel: Channel) -> None:
        """Have the program run, until its end. Raises: LauncherError, OSError for why there is no exit code."""

    @abstractmethod
    def stop(self, grace_s: float) -> None:
        """Ask the far end to end its program; called again for a shorter grace."""

    def serve(self, transport_for: Callable[[Host], Transport], turns: Turns) -> None:
        """Connect and follow the program to its end; every failure becomes the result's `error`."""
        try:
            channel = self.opening.open(transport_for, turns)
            self.result.transport = self.opening.transport
            self.result.connect_s = self.opening.opened_s - self.opening.start_s
            self.follow(channel)
        except (LauncherError, OSError) as error:
            self.result.transport = self.opening.transport
            self.fail(error)

    def fail(self, error: LauncherError | OSError) -> None:
        """Keep why this host has no exit code, unless it has one or the reason is known already."""
        if self.result.error is None and self.result.exit_code is None:
            found = error.diagnostics[0] if isinstance(error, LauncherError) else Diagnostic(str(error))
            self.result.error = Diagnostic(found.message, self.result.host.name, found.hint, found.shared)

    def keep(self, data: bytes, stream: bytearray) -> None:
        """Add to what the host printed, up to the most that is kept."""
        result = self.result
        if result.answered_s is None:
            result.answered_s = time.time()
        room = MAX_OUTPUT_BYTES - len(result.stdout) - len(result.stderr)
        kept = self.held.take(max(0, min(len(data), room)))
        result.is_cut = result.is_cut or len(data) > kept
        stream += data[:kept]


def host_variables(number: int) -> dict[str, str]:
    """Return the variables that tell a program which of the hosts it runs on."""
    return {env.RANK.name: str(number), env.NODE_RANK.name: str(number)}


class Everywhere:
    """One program on many hosts. Use once, from the main thread."""

    def __init__(
        self,
        tasks: Sequence[Task],
        transport_for: Callable[[Host], Transport],
        job_id: str,
        on_waiting: Callable[[str], None] = lambda _: None,
        session: Callable[[int, Task, str], Session] | None = None,
    ) -> None:
        """on_waiting: told once, after 2 s, what is being waited for. session: makes the session of one host; None: an
        `AgentSession`."""
        if session is None:
            from launcher.hosts.agent_session import AgentSession  # bare commands do without the agents' protocol

            session = AgentSession
        self.interrupted_by: int | None = None  # number of the signal that ended the run
        self.unconfirmed_hosts: tuple[str, ...] = ()  # lost hosts that could not be asked what is left there
        self._sessions = [session(number, task, job_id) for number, task in enumerate(tasks)]
        self.listener = Listener()
        self.held = Held()
        for member in self._sessions:
            member.held = self.held
        self._transport_for = transport_for
        self._job_id = job_id
        self._on_waiting = on_waiting
        self._ended: queue.SimpleQueue[Session | None] = queue.SimpleQueue()
        self._signals = SignalQueue(_HANDLED_SIGNALS, ())
        self._signals.wake = lambda: self._ended.put(None)
        self._num_signals = 0
        self._grace_s: float | None = None  # set once the programs were asked to end
        self._give_up_at_s: float | None = None

    def run(
        self, timeout_s: float | None = None, is_enough: Callable[[HostResult], bool] = lambda _: False
    ) -> list[HostResult]:
        """Run to the end on every host; the results come in the order of the tasks.

        timeout_s: end what still runs after so long. is_enough: says that a host has printed what was wanted; once it
        holds for every host that is left, all are ended.
        """
        turns = Turns(max_parallel(len(self._sessions)))
        with self._signals.listening():
            for session in self._sessions:
                threading.Thread(target=self._serve, args=(session, turns), daemon=True).start()
            try:
                self._wait(timeout_s, is_enough, turns)
            finally:
                for session in self._sessions:
                    if session.channel is not None:
                        session.channel.close()
        lost = [session.result.host for session in self._sessions if session.is_lost]
        if lost:
            from launcher.job.cleanup import sweep_lost_hosts

            self.unconfirmed_hosts = sweep_lost_hosts(lost, self._transport_for, self._job_id)
        return [session.result for session in self._sessions]

    def _serve(self, session: Session, turns: Turns) -> None:
        try:
            session.serve(self._transport_for, turns)
        finally:
            self._ended.put(session)

    def _wait(self, timeout_s: float | None, is_enough: Callable[[HostResult], bool], turns: Turns) -> None:
        start_s = time.monotonic()
        tell_at_s = start_s + TELL_AFTER_S
        left = dict.fromkeys(self._sessions)
        while left:
            with contextlib.suppress(queue.Empty):
                ended = self._ended.get(timeout=0.05 if self._has_output(left) else 0.2)
                if ended is not None:
                    if ended in left:
                        del left[ended]
                        self.listener.ended(ended.result)
                    continue
            self.listener.turn()
            running = list(left)
            now_s = time.monotonic()
            if self._give_up_at_s is not None and now_s > self._give_up_at_s:
                return self._abandon(running)
            turns.look()
            self._num_signals += len(self._signals.take())
            if self._num_signals:
                self.interrupted_by = self._signals.first_stop
                self._stop(running, GRACE_S if self._num_signals == 1 else 0.0)
            elif timeout_s is not None and now_s - start_s > timeout_s:
                self._stop(running, GRACE_S, f"not done after {timeout_s:g} s")
            elif all(is_enough(session.result) for session in running):
                self._stop(running, 0.0)
            self._check_answers(running, now_s)
            if now_s > tell_at_s:
                tell_at_s = float("inf")
                self._on_waiting(waiting_text([session.result.host.name for session in running], len(self._sessions)))

    @staticmethod
    def _has_output(running: Iterable[Session]) -> bool:
        return any(session.result.stdout for session in running)

    def _stop(self, running: Sequence[Session], grace_s: float, why: str | None = None) -> None:
        """Ask every host, once for each shorter grace, to end its program; give up on those that do not answer.

        why: the error of every host that is still running, None when its own end will say enough.
        """
        if self._grace_s is not None and grace_s >= self._grace_s:
            return
        self._grace_s = grace_s
        self._give_up_at_s = time.monotonic() + grace_s + timeouts().exec_goodbye_s
        for session in running:
            if why is not None:
                session.fail(TransportError(why))
            if session.opening.give_up() is None:
                session.fail(TransportError(NEVER_CONNECTED))
                self._ended.put(session)
            else:
                session.stop(grace_s)

    def _abandon(self, running: Sequence[Session]) -> None:
        for session in running:
            session.fail(TransportError("it did not answer"))

    def _check_answers(self, running: Sequence[Session], now_s: float) -> None:
        for session in running:
            if session.channel is None:
                continue
            if not session.has_answered and now_s - session.opening.opened_s > timeouts().answer_s:
                session.fail(TransportError(f"no answer within {timeouts().answer_s:g} s"))
                session.channel.close()
            since_s = session.silent_since_s
            if since_s is not None and now_s - since_s > DEFAULT_LEASE_S:
                session.fail(TransportError(f"no sign of life for {DEFAULT_LEASE_S:.0f} s"))
                session.channel.close()
