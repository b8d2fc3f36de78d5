"""Run one program on every host at once and keep what each printed.

A job stops at its first failure; here every host is on its own. A host that cannot be reached is a result like any
other. The agents are the ordinary ones: environment and arguments travel inside the stream, and what a program
leaves behind is ended when it ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

from launcher.agent.wire import (
    Bye,
    Decoder,
    Exited,
    Hello,
    Message,
    Output,
    PickPort,
    Ping,
    PortPicked,
    Spawn,
    SpawnFailed,
    Stop,
    check_version,
    encode,
)
from launcher.base import env
from launcher.base.errors import Diagnostic, LauncherError, TransportError
from launcher.cluster.cluster import Host
from launcher.cluster.fold import fold
from launcher.job.environment import forwarded
from launcher.job.plan import DEFAULT_LEASE_S, PING_INTERVAL_S
from launcher.job.report import shell_code
from launcher.job.sweep import sweep_lost_hosts
from launcher.job.window import Window
from launcher.transport.api import Channel, Transport
from launcher.transport.diagnose import start_failure
from launcher.transport.fanout import MAX_PARALLEL

MAX_OUTPUT_BYTES = 64 << 20  # of one host; what follows is dropped, and the result says so
GRACE_S = 5.0  # between SIGTERM and SIGKILL
_STOP_MARGIN_S = 5.0  # what agents get beyond the grace to say goodbye
_ANSWER_TIMEOUT_S = 30.0
_TELL_AFTER_S = 2.0
_READ_BYTES = 1 << 18
_MAX_NAMES_CHARS = 80
_NEVER_CONNECTED = "stopped before it was connected"
_HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Task:
    """What one host is to run."""

    host: Host
    command: tuple[str, ...]  # arguments of launcher.worker: kind, target, arguments
    cwd: str


@dataclass
class HostResult:
    """What one host did; complete once `run` has returned it."""

    host: Host
    transport: str = ""  # name of what reaches it
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    is_cut: bool = False  # it printed more than MAX_OUTPUT_BYTES
    exit_code: int | None = None  # as a shell shows it; None: it never ran, or its end is not known
    error: Diagnostic | None = None  # why there is no exit code
    connect_s: float | None = None  # until the agent's process was started
    round_trip_s: float | None = None  # one question and its answer
    started_s: float | None = None  # wall clock of this machine when the program was asked to start ...
    answered_s: float | None = None  # ... and when its first output came
    port: int | None = None  # one that was free on the host


class _Session:
    """One host: a channel and the thread that reads it."""

    def __init__(self, number: int, task: Task, job_id: str) -> None:
        self.result = HostResult(task.host)
        self.channel: Channel | None = None
        self.opened_s: float | None = None  # monotonic
        self.heard_s = 0.0  # monotonic, when the agent last said something; it answers every ping
        self.has_answered = False
        self.was_started = False
        self.said_bye = False
        self.is_over = False
        self.unwanted = threading.Event()  # nobody waits for its start any more
        self._number = number
        self._task = task
        self._job_id = job_id
        self._asked_s = 0.0
        self._window: Window | None = None  # once there is a channel

    def serve(self, transport_for: Callable[[Host], Transport], room: threading.Semaphore) -> None:
        """Start the agent and follow it to its end; every failure becomes the result's `error`."""
        try:
            with room:
                channel = self._open(transport_for)
            decoder = Decoder(expect_magic=True)
            while data := channel.read(_READ_BYTES):
                self.heard_s = time.monotonic()
                for message in decoder.feed(data):
                    self._handle(message, channel)
            if not self.has_answered:
                raise start_failure(channel, None)
            raise TransportError("stopped before its end" if self.said_bye else "the connection was lost")
        except (LauncherError, OSError) as error:
            self.fail(error)

    def fail(self, error: LauncherError | OSError) -> None:
        """Keep why this host has no exit code, unless it has one or the reason is known already."""
        if self.result.error is None and self.result.exit_code is None:
            found = error.diagnostics[0] if isinstance(error, LauncherError) else Diagnostic(str(error))
            self.result.error = Diagnostic(found.message, self.result.host.name, found.hint)

    def send(self, message: Message) -> None:
        """Send a message; a lost connection is noticed by the reader."""
        if self.channel is not None:
            with contextlib.suppress(TransportError):
                self.channel.write(encode(message))

    def _open(self, transport_for: Callable[[Host], Transport]) -> Channel:
        if self.unwanted.is_set():
            raise TransportError(_NEVER_CONNECTED)
        start_s = time.monotonic()
        transport = transport_for(self._task.host)
        self.result.transport = transport.name
        channel = transport.open(self._task.host)
        self.opened_s = time.monotonic()
        self.result.connect_s = self.opened_s - start_s
        self.channel = channel
        self._window = Window(channel.window_bytes)
        if self.unwanted.is_set():
            channel.close()
        return channel

    def _handle(self, message: Message, channel: Channel) -> None:
        result = self.result
        if isinstance(message, Hello):
            self.has_answered = True
            check_version(message, channel.host_name)
            self._asked_s = time.monotonic()
            self.send(PickPort())
        elif isinstance(message, PortPicked):
            result.round_trip_s = time.monotonic() - self._asked_s
            result.port = message.port
            result.started_s = time.time()
            self.was_started = True
            self.send(self._spawn_message())
        elif isinstance(message, Output):
            self._keep(message)
            if self._window is not None and (handled := self._window.handled(message)) is not None:
                self.send(handled)
        elif isinstance(message, SpawnFailed):
            hint = "run this from a folder that every host has, such as /"
            result.error = Diagnostic(f"it could not be started: {message.reason}", result.host.name, hint)
        elif isinstance(message, Exited):
            result.exit_code = shell_code(message.status)
            result.stderr += str((message.record or {}).get("traceback", "")).encode("utf-8", "backslashreplace")
        elif isinstance(message, Bye):
            self.said_bye = True

    def _spawn_message(self) -> Spawn:
        number = str(self._number)
        return Spawn(
            job_id=self._job_id,
            commands=[list(self._task.command)],
            cwd=self._task.cwd,
            env={} if self.result.transport == "local" else forwarded(os.environ),
            rank_envs=[{env.RANK.name: number, env.NODE_RANK.name: number}],
            lease_s=None if self.result.transport == "local" else DEFAULT_LEASE_S,
            grace_s=GRACE_S,
            window_bytes=None if self.channel is None else self.channel.window_bytes,
        )

    def _keep(self, message: Output) -> None:
        result = self.result
        if result.answered_s is None:
            result.answered_s = time.time()
        room = MAX_OUTPUT_BYTES - len(result.stdout) - len(result.stderr)
        result.is_cut = result.is_cut or len(message.data) > room
        kept = result.stdout if message.stream == "stdout" else result.stderr
        kept += message.data[: max(0, room)]


class Everywhere:
    """One program on many hosts. Use once, from the main thread."""

    def __init__(
        self,
        tasks: Sequence[Task],
        transport_for: Callable[[Host], Transport],
        job_id: str,
        on_waiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        """on_waiting: told once, after 2 s, what is being waited for."""
        self.interrupted_by: int | None = None  # number of the signal that ended the run
        self.unconfirmed_hosts: tuple[str, ...] = ()  # lost hosts that could not be asked what is left there
        self._sessions = [_Session(number, task, job_id) for number, task in enumerate(tasks)]
        self._transport_for = transport_for
        self._job_id = job_id
        self._on_waiting = on_waiting
        self._ended: queue.SimpleQueue[_Session | None] = queue.SimpleQueue()
        self._signals: list[int] = []
        self._grace_s: float | None = None  # set once the programs were asked to end
        self._give_up_at_s: float | None = None

    def run(
        self, timeout_s: float | None = None, is_enough: Callable[[HostResult], bool] = lambda _: False
    ) -> list[HostResult]:
        """Run to the end on every host; the results come in the order of the tasks.

        timeout_s: end what still runs after so long. is_enough: says that a host has printed what was wanted; once it
        holds for every host that is left, all are ended.
        """
        room = threading.Semaphore(MAX_PARALLEL)
        with self._signal_handlers():
            for session in self._sessions:
                threading.Thread(target=self._serve, args=(session, room), daemon=True).start()
            try:
                self._wait(timeout_s, is_enough)
            finally:
                for session in self._sessions:
                    if session.channel is not None:
                        session.channel.close()
        lost = [s.result.host for s in self._sessions if s.was_started and not s.said_bye]
        self.unconfirmed_hosts = sweep_lost_hosts(lost, self._transport_for, self._job_id)
        return [session.result for session in self._sessions]

    def _serve(self, session: _Session, room: threading.Semaphore) -> None:
        try:
            session.serve(self._transport_for, room)
        finally:
            self._ended.put(session)

    def _wait(self, timeout_s: float | None, is_enough: Callable[[HostResult], bool]) -> None:
        start_s = time.monotonic()
        ping_at_s, tell_at_s = start_s + PING_INTERVAL_S, start_s + _TELL_AFTER_S
        while running := [session for session in self._sessions if not session.is_over]:
            with contextlib.suppress(queue.Empty):
                ended = self._ended.get(timeout=0.05 if self._has_output(running) else 0.2)
                if ended is not None:
                    ended.is_over = True
                    continue
            now_s = time.monotonic()
            if self._give_up_at_s is not None and now_s > self._give_up_at_s:
                return self._abandon(running)
            if self._signals:
                self.interrupted_by = self._signals[0]
                self._stop(running, GRACE_S if len(self._signals) == 1 else 0.0)
            elif timeout_s is not None and now_s - start_s > timeout_s:
                self._stop(running, GRACE_S, f"not done after {timeout_s:g} s")
            elif all(is_enough(session.result) for session in running):
                self._stop(running, 0.0)
            self._check_answers(running, now_s)
            if now_s > tell_at_s:
                tell_at_s = float("inf")
                self._tell(running)
            if now_s > ping_at_s:
                ping_at_s = now_s + PING_INTERVAL_S
                for session in running:
                    session.send(Ping())

    @staticmethod
    def _has_output(running: Sequence[_Session]) -> bool:
        return any(session.result.stdout for session in running)

    def _tell(self, running: Sequence[_Session]) -> None:
        names = fold([session.result.host.name for session in running])
        short = names if len(names) <= _MAX_NAMES_CHARS else names[:_MAX_NAMES_CHARS] + "…"
        self._on_waiting(f"{short}, {len(running)} of {len(self._sessions)}")

    def _stop(self, running: Sequence[_Session], grace_s: float, why: str | None = None) -> None:
        """Ask every agent, once for each shorter grace, to end its program; give up on those that do not answer.

        why: the error of every host that is still running, None when its own end will say enough.
        """
        if self._grace_s is not None and grace_s >= self._grace_s:
            return
        self._grace_s = grace_s
        self._give_up_at_s = time.monotonic() + grace_s + _STOP_MARGIN_S
        for session in running:
            if why is not None:
                session.fail(TransportError(why))
            # Set before looking: the thread that connects stores its channel first and looks at this afterwards.
            session.unwanted.set()
            if session.channel is None:
                session.fail(TransportError(_NEVER_CONNECTED))
                session.is_over = True
            session.send(Stop(grace_s))

    def _abandon(self, running: Sequence[_Session]) -> None:
        for session in running:
            session.fail(TransportError("it did not answer"))

    def _check_answers(self, running: Sequence[_Session], now_s: float) -> None:
        for session in running:
            if session.opened_s is None or session.channel is None:
                continue
            if not session.has_answered and now_s - session.opened_s > _ANSWER_TIMEOUT_S:
                session.fail(TransportError(f"the agent did not answer within {_ANSWER_TIMEOUT_S:.0f} s"))
                session.channel.close()
            # An agent on this machine has no lease either: its pipe tells its end.
            is_silent = now_s - session.heard_s > DEFAULT_LEASE_S and session.result.transport != "local"
            if session.has_answered and is_silent:
                session.fail(TransportError(f"no sign of life for {DEFAULT_LEASE_S:.0f} s"))
                session.channel.close()

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        def remember(number: int, _frame: FrameType | None) -> None:
            self._signals.append(number)
            self._ended.put(None)

        previous = {number: signal.signal(number, remember) for number in _HANDLED_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
