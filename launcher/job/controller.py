"""Run a job: start the agents, merge what they tell, stop everybody at the first failure."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from launcher.agent.wire import (
    Bye,
    Exited,
    Hello,
    Message,
    Output,
    PickPort,
    Ping,
    PortPicked,
    Spawn,
    SpawnFailed,
    Started,
    Stop,
    check_version,
)
from launcher.base.errors import ExitCode, LauncherError, TransportError
from launcher.cluster.cluster import Host
from launcher.job.environment import rank_variables, srun_tokens
from launcher.job.events import Watcher
from launcher.job.logs import RankLog
from launcher.job.node import ChannelEnded, Inbox, Node
from launcher.job.plan import PING_INTERVAL_S, SSH_LEASE_S, JobPlan
from launcher.job.report import Failure, RunReport, describe_status, shell_code, signal_name
from launcher.job.sweep import sweep_lost_hosts
from launcher.transport.api import Transport
from launcher.transport.diagnose import start_failure
from launcher.transport.fanout import open_all

_HELLO_TIMEOUT_S = 30.0
_TELL_AFTER_S = 2.0  # a wait longer than this is explained to the user
_LAST_LINES = 15
# What agents get beyond the grace to end their ranks and say goodbye.
_BYE_MARGIN_S = 15.0
_HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Controller:
    """One run. Use once: `Controller(plan, transport_for, watcher).run()`, from the main thread."""

    def __init__(self, plan: JobPlan, transport_for: Callable[[Host], Transport], watcher: Watcher) -> None:
        self._plan = plan
        self._transport_for = transport_for
        self._watcher = watcher
        self._inbox = Inbox()
        self._nodes: list[Node] = []
        self._logs: dict[int, RankLog] = {}
        self._signals: list[int] = []
        self._num_signals_handled = 0
        self._start_s = time.monotonic()
        self._last_ping_s = self._start_s
        self._stop_started_s: float | None = None
        self._stop_deadline_s: float | None = None
        self._failure: Failure | None = None
        self._num_stopped = 0

    def run(self, check: Callable[[], None] | None = None) -> RunReport:
        """Run to the end and return how it went. Signals ask for an orderly stop, a second one for a quick one.

        check: called while the agents start; what it raises ends the run before any rank is started.
        Raises: LauncherError when nothing could be started.
        """
        with self._signal_handlers():
            try:
                self._connect(check)
                self._spawn()
                while not all(node.ended for node in self._nodes):
                    self._turn()
            finally:
                self._release()
        return self._finish()

    # ---- start ----

    def _connect(self, check: Callable[[], None] | None) -> None:
        hosts = [node.host for node in self._plan.placement.nodes]
        channels = open_all(self._transport_for, hosts)
        self._nodes = [
            Node(placement, channel) for placement, channel in zip(self._plan.placement.nodes, channels, strict=True)
        ]
        for node in self._nodes:
            self._inbox.listen(node)
        if check is not None:
            check()
        for node, hello in zip(self._nodes, self._expect(self._nodes, Hello, "the agents to answer"), strict=True):
            node.devices = hello.devices
        if self._plan.master_port is None:
            self._nodes[0].send(PickPort())
            (picked,) = self._expect(self._nodes[:1], PortPicked, "a free port")
            self._plan = dataclasses.replace(self._plan, master_port=picked.port)

    def _expect(self, nodes: list[Node], kind: type[Any], what: str) -> list[Any]:
        """Wait for one message of `kind` from each node. Raises: LauncherError with every node that failed."""
        answers: dict[int, Message] = {}
        failures: list[LauncherError] = []
        deadline_s = time.monotonic() + _HELLO_TIMEOUT_S
        tell_at_s = time.monotonic() + _TELL_AFTER_S
        while len(answers) + len(failures) < len(nodes):
            self._stop_if_interrupted()
            event = self._inbox.get(0.2)
            now_s = time.monotonic()
            missing = [node.name for node in nodes if node.placement.node_rank not in answers]
            if now_s > deadline_s:
                raise TransportError(
                    f"no answer after {_HELLO_TIMEOUT_S:.0f} s while waiting for {what}",
                    where=", ".join(missing),
                )
            if now_s > tell_at_s:
                self._watcher.waiting(f"{what}: {len(answers)} of {len(nodes)}, missing {', '.join(missing[:5])}")
                tell_at_s = deadline_s + 1
            if event is None:
                continue
            node, message = event
            if isinstance(message, ChannelEnded):
                failures.append(start_failure(node.channel))
            elif isinstance(message, kind):
                answers[node.placement.node_rank] = message
                if isinstance(message, Hello):
                    check_version(message, node.name)
        if failures:
            raise TransportError.from_diagnostics([d for error in failures for d in error.diagnostics])
        return [answers[node.placement.node_rank] for node in nodes]

    def _spawn(self) -> None:
        plan = self._plan
        if plan.master_port is None:
            raise RuntimeError("the master port is chosen before ranks are started")
        self._make_run_folder()
        self._watcher.planned(plan)
        for node in self._nodes:
            transport = plan.transports[node.placement.node_rank]
            is_local = transport == "local"
            tokens = plan.device_tokens if is_local else ()
            if transport == "srun":
                tokens = srun_tokens(node.placement, node.devices)
            rank_envs = rank_variables(plan.placement, node.placement, (plan.master_addr, plan.master_port), tokens)
            node.running = set(node.placement.ranks)
            node.send(
                Spawn(
                    job_id=plan.job_id,
                    commands=[plan.command.for_local_rank(i) for i in range(node.placement.num_ranks)],
                    cwd=plan.cwd,
                    env=plan.forwarded_env if transport == "ssh" else {},  # srun has passed on all of it
                    rank_envs=rank_envs,
                    lease_s=SSH_LEASE_S if transport == "ssh" else None,
                    grace_s=plan.grace_s,
                )
            )

    def _make_run_folder(self) -> None:
        folder = self._plan.run_folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for rank in range(self._plan.placement.world_size):
                self._logs[rank] = RankLog(folder / f"rank_{rank}.log")
        except OSError as error:
            raise LauncherError(
                f"the run folder cannot be written: {error.strerror}",
                where=str(error.filename or folder),
                hint="choose another with --log-dir",
            ) from None

    # ---- the loop ----

    def _turn(self) -> None:
        event = self._inbox.get(PING_INTERVAL_S / 2)
        if event is not None:
            self._handle(*event)
        now_s = time.monotonic()
        if now_s - self._last_ping_s >= PING_INTERVAL_S:
            self._last_ping_s = now_s
            for node in self._nodes:
                if not node.ended:
                    node.send(Ping())
        self._handle_signals()
        if self._stop_deadline_s is not None and now_s > self._stop_deadline_s:
            for node in self._nodes:
                if not node.ended:
                    node.channel.close()  # the agent's lease ends with it
                    node.ended = True

    def _handle(self, node: Node, message: Message | ChannelEnded) -> None:
        if isinstance(message, Output):
            self._on_output(message)
        elif isinstance(message, Started):
            node.pids[message.rank] = message.pid
        elif isinstance(message, Exited):
            self._on_exit(node, message)
        elif isinstance(message, SpawnFailed):
            node.running.clear()
            self._fail(self._host_failure(node, f"no rank could be started: {message.reason}"))
        elif isinstance(message, Bye):
            node.said_bye = True
            node.running.clear()
        elif isinstance(message, ChannelEnded):
            node.ended = True
            if not node.said_bye:
                self._fail(self._host_failure(node, f"the agent ended or {message.reason}"))

    def _on_output(self, message: Output) -> None:
        self._write_log(message.rank, message.data)
        self._watcher.output(message.rank, message.stream, message.data)

    def _write_log(self, rank: int, data: bytes) -> None:
        log = self._logs[rank]
        had_error = log.write_error is not None
        log.write(data)
        if log.write_error is not None and not had_error:
            self._watcher.warning(f"{log.path}: {log.write_error.strerror}; the log is incomplete, the job goes on")

    def _on_exit(self, node: Node, message: Exited) -> None:
        node.running.discard(message.rank)
        if self._stop_started_s is not None:
            self._num_stopped += 1
        if message.status == 0:
            return
        log = self._logs[message.rank]
        record = message.record or {}
        traceback = str(record.get("traceback", ""))
        last_lines = log.last_lines(_LAST_LINES)
        self._write_log(message.rank, traceback.encode("utf-8", "backslashreplace"))
        self._fail(
            Failure(
                host=node.name,
                rank=message.rank,
                pid=node.pids.get(message.rank),
                exit_code=shell_code(message.status),
                signal_name=signal_name(message.status),
                after_s=time.monotonic() - self._start_s,
                reason=describe_status(message.status, record),
                traceback=traceback,
                last_lines=last_lines,
                log=str(log.path),
            )
        )

    def _host_failure(self, node: Node, reason: str) -> Failure:
        return Failure(
            host=node.name,
            rank=None,
            pid=None,
            exit_code=ExitCode.UNREACHABLE,
            signal_name=None,
            after_s=time.monotonic() - self._start_s,
            reason=reason,
            traceback="",
            last_lines=tuple(node.channel.stderr_tail().splitlines()[-_LAST_LINES:]),
            log=None,
        )

    # ---- stop ----

    def _fail(self, failure: Failure) -> None:
        """Keep the first failure and stop everybody; what fails afterwards is its victim."""
        if self._stop_started_s is not None:
            return
        self._failure = failure
        who = f"rank {failure.rank}" if failure.rank is not None else failure.host
        self._stop(f"{who} failed ({failure.reason})", self._plan.grace_s)

    def _stop(self, why: str, grace_s: float) -> None:
        now_s = time.monotonic()
        if self._stop_started_s is None:
            self._stop_started_s = now_s
            if any(node.running for node in self._nodes):
                self._watcher.stopping(why)
        self._stop_deadline_s = now_s + grace_s + _BYE_MARGIN_S
        for node in self._nodes:
            if not node.ended:
                node.send(Stop(grace_s))

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        def remember(number: int, _frame: FrameType | None) -> None:
            self._signals.append(number)
            self._inbox.wake()

        previous = {number: signal.signal(number, remember) for number in _HANDLED_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _handle_signals(self) -> None:
        while self._num_signals_handled < len(self._signals):
            self._num_signals_handled += 1
            name = signal.Signals(self._signals[self._num_signals_handled - 1]).name
            is_first = self._num_signals_handled == 1
            why = f"{name}: stopping all ranks" if is_first else f"{name} again: killing all ranks"
            self._stop(why, self._plan.grace_s if is_first else 0.0)

    def _stop_if_interrupted(self) -> None:
        if self._signals:
            name = signal.Signals(self._signals[0]).name
            error = LauncherError(f"{name} before any rank was started")
            error.exit_code = 128 + self._signals[0]
            raise error

    # ---- end ----

    def _release(self) -> None:
        """Let go of agents and logs: also when something failed half-way, nothing may stay behind."""
        for node in self._nodes:
            node.channel.close_stdin()
        for node in self._nodes:
            if not node.ended:
                node.channel.wait(self._plan.grace_s)
            node.channel.close()
        for log in self._logs.values():
            log.close()

    def _finish(self) -> RunReport:
        lost = [node.placement.host for node in self._nodes if not node.said_bye]
        unconfirmed = sweep_lost_hosts(lost, self._transport_for, self._plan.job_id)
        now_s = time.monotonic()
        if self._failure is not None:
            exit_code = self._failure.exit_code
        else:
            exit_code = 128 + self._signals[0] if self._signals else 0
        report = RunReport(
            job_id=self._plan.job_id,
            exit_code=int(exit_code),
            world_size=self._plan.placement.world_size,
            duration_s=now_s - self._start_s,
            interrupted_by=signal.Signals(self._signals[0]).name if self._signals else None,
            failure=self._failure,
            num_stopped=self._num_stopped,
            stop_s=now_s - self._stop_started_s if self._stop_started_s is not None else 0.0,
            unconfirmed_hosts=unconfirmed,
        )
        try:
            report.save(self._plan.run_folder / "report.json")
        except OSError as error:
            self._watcher.warning(f"report.json could not be written: {error.strerror}")
        return report
