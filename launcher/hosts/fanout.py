"""Run one program on every host at once and keep what each printed.

A job stops at its first failure; here every host is on its own. A host that cannot be reached is a result like any
other. A host runs the program under an agent (`hosts.fanout`) or under a plain shell (`hosts.shell_session`);
either way environment and arguments travel inside the stream.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

from launcher.agent.wire import Exited, Hello, Message, Output, PickPort, PortPicked, Spawn, SpawnFailed
from launcher.base.errors import Diagnostic
from launcher.base.exit_codes import shell_code
from launcher.base.timeouts import timeouts
from launcher.cluster.cluster import Host
from launcher.fleet.agent_link import AgentLink
from launcher.fleet.fleet import Fleet, sweep_lost_hosts
from launcher.fleet.host_link import Event, HostEnded
from launcher.fleet.signals import SignalQueue
from launcher.hosts.session import GRACE_S, Held, HostResult, HostRun, Task
from launcher.hosts.shell_session import ShellSession
from launcher.plan.plan import DEFAULT_LEASE_S
from launcher.plan.variables import forwarded
from launcher.transport.api import Transport

# ---- One program on one host under an ordinary agent, which ends whatever the program leaves behind ----
# `launch check` and `launch exec --supervise` run programs so.


class AgentSession(AgentLink):
    """One host with an agent whose only rank is the program."""

    def __init__(self, run: HostRun) -> None:
        super().__init__(run.task.host, (run.number,))
        self.run = run
        self._asked_s = 0.0

    @property
    def is_lost(self) -> bool:
        """True when something may be left on the host and no agent there ends it."""
        return self.run.result.started_s is not None and not self.exited_cleanly

    def take_output(self, output: Output) -> None:
        result = self.run.result
        self.run.keep(output.data, result.stdout if output.stream == "stdout" else result.stderr)
        self.handled(output)

    def handle(self, message: Message) -> None:
        """Take the next message of the agent. On the main thread."""
        result = self.run.result
        if isinstance(message, Hello):
            self._asked_s = time.monotonic()
            self.send(PickPort())
        elif isinstance(message, PortPicked):
            result.round_trip_s = time.monotonic() - self._asked_s
            result.port = message.port
            result.started_s = time.time()
            self.send(self._spawn_message())
        elif isinstance(message, SpawnFailed):
            result.error = Diagnostic(f"it could not be started: {message.reason}", self.name, message.hint)
        elif isinstance(message, Exited):
            result.exit_code = shell_code(message.status)
            result.stderr += str((message.record or {}).get("traceback", "")).encode("utf-8", "backslashreplace")

    def _spawn_message(self) -> Spawn:
        task, is_local = self.run.task, self.transport == "local"
        return Spawn(
            job_id=self.run.job_id,
            commands=[list(task.command)],
            cwd=task.cwd,
            forwarded_env={} if is_local else forwarded(os.environ),
            env={},
            rank_envs=[self.run.variables],
            lease_s=None if is_local else DEFAULT_LEASE_S,
            grace_s=GRACE_S,
            window_bytes=self.window.num_bytes,
        )


# ---- Run one program on every host at once and keep what each printed ----


_HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_INTERVAL_S = 0.1  # between two looks at all hosts

Session = AgentSession | ShellSession


class Listener:
    """Called during a run, on the thread of `Fanout.run`; this one does nothing."""

    def ended(self, result: HostResult) -> None:
        """Take the result of a host, which is complete."""

    def turn(self) -> None:
        """Use the time between two events; called at least a few times a second."""


class Fanout:
    """One program on many hosts. Use once, from the main thread."""

    def __init__(
        self,
        tasks: Sequence[Task],
        transport_for: Callable[[Host], Transport],
        job_id: str,
        on_waiting: Callable[[str], None] = lambda _: None,
        *,
        has_agents: bool = True,
    ) -> None:
        """on_waiting: called once, after 2 s, with what is waited for. has_agents: False: plain shells run commands."""
        self.interrupted_by: int | None = None  # number of the signal that ended the run
        self.unconfirmed_hosts: tuple[str, ...] = ()  # lost hosts that could not confirm that nothing is left
        self.listener = Listener()
        self.held = Held()
        self._transport_for = transport_for
        self._job_id = job_id
        runs = [HostRun(number, task, job_id, self.held) for number, task in enumerate(tasks)]
        session: Callable[[HostRun], Session] = AgentSession if has_agents else ShellSession
        self._fleet: Fleet[Session] = Fleet(
            [session(run) for run in runs],
            transport_for,
            lease_s=DEFAULT_LEASE_S,
            goodbye_s=timeouts().exec_goodbye_s,
            on_waiting=on_waiting,
        )
        self._signals = SignalQueue(_HANDLED_SIGNALS, ())
        self._signals.wake = self._fleet.wake
        self._num_signals = 0

    def run(
        self, timeout_s: float | None = None, is_enough: Callable[[HostResult], bool] = lambda _: False
    ) -> list[HostResult]:
        """Run to the end on every host; the results come in the order of the tasks.

        timeout_s: end what still runs after so long. is_enough: says that a host has printed what was wanted; once it
        holds for every host that is left, all are ended.
        """
        fleet = self._fleet
        with self._signals.listening():
            try:
                fleet.start()
                self._wait(timeout_s, is_enough)
            finally:
                fleet.close()
        lost = [session.host for session in fleet.links if isinstance(session, AgentSession) and session.is_lost]
        self.unconfirmed_hosts = sweep_lost_hosts(lost, self._transport_for, self._job_id)
        return [session.run.result for session in fleet.links]

    def _wait(self, timeout_s: float | None, is_enough: Callable[[HostResult], bool]) -> None:
        fleet, start_s = self._fleet, time.monotonic()
        look_at_s = start_s
        while not fleet.is_over:
            found = fleet.get(_LOOK_INTERVAL_S)
            fleet.liveness.was_away()
            if found is not None:
                self._handle(*found)
            now_s = time.monotonic()
            if now_s < look_at_s:
                continue
            look_at_s = now_s + _LOOK_INTERVAL_S
            self.listener.turn()
            running = fleet.running
            self._num_signals += len(self._signals.take())
            if self._num_signals:
                self.interrupted_by = self._signals.first_stop
                fleet.stop(GRACE_S if self._num_signals == 1 else 0.0)
            elif timeout_s is not None and now_s - start_s > timeout_s:
                for session in running:  # before the stop: the exit code that it causes is not the command's
                    session.run.fail(f"not done after {timeout_s:g} s")
                    session.run.result.is_late = True
                fleet.stop(GRACE_S)
            elif running and all(is_enough(session.run.result) for session in running):
                fleet.stop(0.0)
            for session, error in fleet.lost(now_s):
                self._end(session, error)
            for session in fleet.overdue(now_s):
                self._end(session, "it did not answer")
            fleet.explain_wait(running)

    def _handle(self, session: Session, event: Event) -> None:
        if isinstance(event, HostEnded):
            self._end(session, event.error or "stopped before its end")
        elif isinstance(event, Message) and isinstance(session, AgentSession):
            session.handle(event)

    def _end(self, session: Session, error: Exception | str) -> None:
        """Conclude a host that has ended. error: why there is no exit code, if there is none."""
        session.run.conclude(session)
        session.run.fail(error)
        self.listener.ended(session.run.result)
