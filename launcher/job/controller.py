"""Run a job: start the agents, merge what they tell, stop everybody at the first failure."""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Callable
from typing import Any

from launcher.agent.wire import (
    Bye,
    Exited,
    Hello,
    Message,
    Notify,
    Output,
    PickPort,
    Ping,
    PortPicked,
    Progress,
    Raised,
    Spawn,
    SpawnFailed,
    Stacks,
    Started,
    Stop,
    check_version,
)
from launcher.base.errors import LauncherError, TransportError, UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.signals import NOTICE_SIGNAL
from launcher.cluster.cluster import Host
from launcher.job.environment import device_tokens, job_variables, rank_variables
from launcher.job.events import Watcher
from launcher.job.failures import FailureBook
from launcher.job.hang import HangWatch, odd_one_out
from launcher.job.logs import RankLog, open_logs
from launcher.job.node import ChannelEnded, Inbox, Node
from launcher.job.plan import PING_INTERVAL_S, JobPlan
from launcher.job.raised import RaisedWatch
from launcher.job.report import RunReport
from launcher.job.signals import SignalQueue
from launcher.job.stacks import StackCollector
from launcher.job.sweep import sweep_lost_hosts
from launcher.transport.api import Transport
from launcher.transport.diagnose import start_failure
from launcher.transport.fanout import open_all

_HELLO_TIMEOUT_S = 30.0
_TELL_AFTER_S = 2.0  # a wait longer than this is explained to the user
# What agents get beyond the grace to end their ranks and say goodbye.
_BYE_MARGIN_S = 15.0


class Controller:
    """One run. Use once: `Controller(plan, transport_for, watcher).run()`, from the main thread."""

    def __init__(self, plan: JobPlan, transport_for: Callable[[Host], Transport], watcher: Watcher) -> None:
        self._plan = plan
        self._transport_for = transport_for
        self._watcher = watcher
        self._inbox = Inbox()
        self._nodes: list[Node] = []
        self._logs: dict[int, RankLog] = {}
        self._signals = SignalQueue(self._inbox.wake, plan.stop_signals)
        self._start_s = time.monotonic()
        self._last_ping_s = self._start_s
        self._stop_started_s: float | None = None
        self._stop_deadline_s: float | None = None
        self._failures = FailureBook(self._start_s)
        self._raised = RaisedWatch(plan.grace_s)
        self._stopped: set[int] = set()  # ranks that ended after the order to
        self._recorded: set[int] = set()  # ranks whose traceback is in their log
        self._was_told_to_stop = False  # by a signal
        self._hang_watch: HangWatch | None = None
        self._is_hanging = False
        self._stacks = StackCollector(plan, watcher)

    def run(self, check: Callable[[], None] | None = None) -> RunReport:
        """Run to the end and return how it went. Signals ask for an orderly stop, a second one for a quick one.

        check: called while the agents start; what it raises ends the run before any rank is started.
        Raises: LauncherError when nothing could be started.
        """
        with self._signals.listening():
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
        if self._nodes[0].placement.node_rank == 0:  # it chooses the port, or looks whether the given one is free
            self._nodes[0].send(PickPort(self._plan.master_port or 0))
            (picked,) = self._expect(self._nodes[:1], PortPicked, "a free port")
            _check_port(picked, self._plan)
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
                failures.append(start_failure(node.channel, message.reason))
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
        self._logs = open_logs(plan)
        self._watcher.planned(plan)
        if plan.hang_timeout_s is not None:
            self._hang_watch = HangWatch(plan.hang_timeout_s, plan.placement.ranks, time.monotonic())
        for node in self._nodes:
            transport = plan.transports[node.placement.node_rank]
            tokens = device_tokens(plan, node.placement, node.devices)
            rank_envs = rank_variables(plan.placement, node.placement, (plan.master_addr, plan.master_port), tokens)
            node.running = set(node.placement.ranks)
            node.send(
                Spawn(
                    job_id=plan.job_id,
                    commands=plan.command.for_ranks(node.placement.num_ranks),
                    cwd=plan.cwd,
                    # srun has passed on the whole environment, and a local agent inherits it.
                    env=job_variables(plan) | (plan.forwarded_env if transport == "ssh" else {}) | plan.given_env,
                    rank_envs=rank_envs,
                    lease_s=None if transport == "local" else plan.lease_s,
                    grace_s=plan.grace_s,
                    bound_cores=None if plan.bound_cores is None else list(plan.bound_cores),
                    window_bytes=node.channel.window_bytes,
                )
            )

    # ---- the loop ----

    def _turn(self) -> None:
        event = self._inbox.get(PING_INTERVAL_S / 2)
        if event is not None:
            self._handle(*event)
        now_s = time.monotonic()
        if now_s - self._last_ping_s >= PING_INTERVAL_S:
            self._last_ping_s = now_s
            for node in self._nodes:
                if not node.ended and self._plan.needs_lease(node.placement.node_rank):
                    node.send(Ping())
            self._check_silence(now_s)
        self._handle_signals()
        self._check_progress(now_s)
        self._check_raised(now_s)
        if self._stop_deadline_s is not None and now_s > self._stop_deadline_s:
            for node in self._nodes:
                if not node.ended:
                    node.channel.close()  # the agent's lease ends with it
                    node.ended = True

    def _check_silence(self, now_s: float) -> None:
        """Give up nodes that a network separates from us: they say nothing, and end their ranks by themselves."""
        for node in self._nodes:
            silence_s = now_s - node.last_heard_s
            has_lease = self._plan.needs_lease(node.placement.node_rank)
            if has_lease and not node.ended and silence_s > self._plan.lease_s:
                node.ended = True
                node.channel.close()
                self._lose_host(node, f"no word for {silence_s:.0f} s")

    def _handle(self, node: Node, message: Message | ChannelEnded) -> None:
        if isinstance(message, Output):
            self._on_output(node, message)
        elif isinstance(message, Progress):
            if self._hang_watch is not None:
                self._hang_watch.beat(message.rank, message.count, time.monotonic())
            step = message.count if message.step is None else message.step
            self._watcher.progress(message.rank, step, message.loss)
        elif isinstance(message, Stacks):
            self._stacks.add(message.rank, message.text)
        elif isinstance(message, Started):
            node.pids[message.rank] = message.pid
            self._watcher.started(message.rank)
        elif isinstance(message, Raised):
            self._on_raised(node, message)
        elif isinstance(message, Exited):
            self._on_exit(node, message)
        elif isinstance(message, SpawnFailed):
            node.running.clear()
            self._lose_host(node, f"no rank could be started: {message.reason}")
        elif isinstance(message, Bye):
            node.said_bye = True
            node.running.clear()
        elif isinstance(message, ChannelEnded):
            node.ended = True
            if not node.said_bye:
                self._lose_host(node, message.reason or "the agent ended or the connection was lost")

    def _on_output(self, node: Node, message: Output) -> None:
        if self._hang_watch is not None:
            self._hang_watch.output(message.rank, time.monotonic())
        self._write_log(message.rank, message.data)
        self._watcher.output(message.rank, message.stream, message.data)
        node.handled(message)

    def _write_log(self, rank: int, data: bytes) -> None:
        log = self._logs[rank]
        had_error = log.write_error is not None
        log.write(data)
        if log.write_error is not None and not had_error:
            self._watcher.warning(f"{log.path}: {log.write_error.strerror}; the log is incomplete, the job goes on")

    def _on_raised(self, node: Node, message: Raised) -> None:
        """Keep what a rank has raised, and wait for its end: exit handlers have the grace for what they do."""
        self._write_traceback(message.rank, message.record)
        self._failures.add_raised(node, message, self._logs[message.rank])
        self._raised.raised(message.rank, time.monotonic())

    def _check_raised(self, now_s: float) -> None:
        cause = self._failures.cause
        if cause is None or self._stop_started_s is not None:
            return
        if self._raised.is_to_be_told(now_s):
            self._watcher.raised(cause)
        if self._raised.is_over(now_s):
            self._stop(f"rank {cause.rank} failed ({cause.reason}) and does not end", self._plan.grace_s)

    def _on_exit(self, node: Node, message: Exited) -> None:
        node.running.discard(message.rank)
        self._watcher.ended(message.rank, message.status)
        self._raised.ended(message.rank)
        if self._hang_watch is not None:
            self._hang_watch.ended(message.rank)
        if self._stop_started_s is not None:
            self._stopped.add(message.rank)
        failure = self._failures.add_exit(node, message, self._logs[message.rank])
        if message.record is not None:
            self._write_traceback(message.rank, message.record)
        if failure is not None:
            self._stop(f"rank {message.rank} failed ({failure.reason})", self._plan.grace_s)

    def _write_traceback(self, rank: int, record: dict[str, Any]) -> None:
        """Complete a rank's log, once: its worker leaves the traceback to us."""
        if rank not in self._recorded:
            self._recorded.add(rank)
            self._write_log(rank, str(record.get("traceback", "")).encode("utf-8", "backslashreplace"))

    def _lose_host(self, node: Node, reason: str) -> None:
        self._failures.add_host(node, reason)
        self._stop(f"{node.name} failed ({reason})", self._plan.grace_s)

    # ---- hangs ----

    def _check_progress(self, now_s: float) -> None:
        """Find out that a rank hangs; when its stacks are there, name it and stop."""
        watch, is_stopping = self._hang_watch, self._stop_started_s is not None
        if watch is not None and not self._is_hanging and not is_stopping and watch.is_expired(now_s):
            self._is_hanging = True
            self._watcher.warning(f"no progress for {self._plan.hang_timeout_s:g} s: asking all ranks for their stacks")
            self._stacks.ask(self._nodes)
        stacks = self._stacks.take(self._nodes)
        if stacks is None or watch is None or not self._is_hanging or is_stopping:
            return
        odd = odd_one_out(stacks, watch.counts)
        rank = odd if odd is not None else min(stacks, default=0)
        node = next(node for node in self._nodes if rank in node.placement.ranks)
        reason = f"no progress for {self._plan.hang_timeout_s:g} s" + (", all ranks alike" if odd is None else "")
        self._failures.add_hang(node, rank, reason, stacks.get(rank, ""), self._logs[rank])
        self._stop(f"rank {rank} hangs ({reason})", self._plan.grace_s)

    # ---- stop ----

    def _stop(self, why: str, grace_s: float, *, by_user: bool = False) -> None:
        """Order all agents to end their ranks. After a failure only the first order counts; a user may insist."""
        if self._stop_started_s is not None and not by_user:
            return
        now_s = time.monotonic()
        self._failures.stop_ordered(by_user=by_user)
        if self._stop_started_s is None:
            self._stop_started_s = now_s
            if any(node.running for node in self._nodes):
                self._watcher.stopping(why)
        self._stop_deadline_s = min(self._stop_deadline_s or math.inf, now_s + grace_s + _BYE_MARGIN_S)
        for node in self._nodes:
            if not node.ended:
                node.send(Stop(grace_s))

    def _handle_signals(self) -> None:
        for number in self._signals.take():
            if number not in self._plan.stop_signals:
                if number == NOTICE_SIGNAL:
                    self._pass_notice_on()
                else:
                    self._stacks.ask(self._nodes)
                continue
            name = signal.Signals(number).name
            is_first = not self._was_told_to_stop
            self._was_told_to_stop = True
            why = f"{name}: stopping all ranks" if is_first else f"{name} again: killing all ranks"
            self._stop(why, self._plan.grace_s if is_first else 0.0, by_user=True)

    def _pass_notice_on(self) -> None:
        """Tell all ranks that the job will be preempted; what they exit with from now on may ask for a requeue."""
        self._watcher.warning(f"{NOTICE_SIGNAL.name}: the job is about to be preempted, telling all ranks")
        self._failures.was_noticed = True
        for node in self._nodes:
            if node.running:
                node.send(Notify())

    def _stop_if_interrupted(self) -> None:
        number = self._signals.first_stop
        if number is not None:
            error = LauncherError(f"{signal.Signals(number).name} before any rank was started")
            error.exit_code = 128 + number
            raise error

    # ---- end ----

    def _release(self) -> None:
        """Let go of agents and logs: also when something failed half-way, nothing may stay behind."""
        for node in self._nodes:
            node.channel.close_stdin()
        deadline_s = time.monotonic() + self._plan.grace_s  # one for all
        for node in self._nodes:
            if not node.ended:
                node.channel.wait(max(0.0, deadline_s - time.monotonic()))
            node.channel.close()
        for log in self._logs.values():
            log.close()

    def _is_told_to_leave(self) -> bool:
        return any(number in self._plan.stop_signals for number in self._signals.take())

    def _finish(self) -> RunReport:
        end_s = time.monotonic()
        lost = [node.placement.host for node in self._nodes if not node.said_bye]
        unconfirmed = sweep_lost_hosts(
            lost, self._transport_for, self._plan.job_id, self._watcher.waiting, self._is_told_to_leave
        )
        failure, interrupt = self._failures.cause, self._signals.first_stop
        exit_code = failure.exit_code if failure is not None else 0
        if failure is None and interrupt is not None:
            exit_code = 128 + interrupt
        elif failure is None and self._failures.wants_requeue:
            exit_code = ExitCode.REQUEUE
        report = RunReport(
            job_id=self._plan.job_id,
            exit_code=int(exit_code),
            world_size=self._plan.placement.world_size,
            duration_s=time.monotonic() - self._start_s,
            interrupted_by=signal.Signals(interrupt).name if interrupt is not None else None,
            failure=failure,
            num_stopped=len(self._stopped - {failure.rank if failure is not None else None}),
            stop_s=end_s - self._stop_started_s if self._stop_started_s is not None else 0.0,
            unconfirmed_hosts=unconfirmed,
        )
        try:
            report.save(self._plan.run_folder / "report.json")
        except OSError as error:
            self._watcher.warning(f"report.json could not be written: {error.strerror}")
        return report


def _check_port(picked: PortPicked, plan: JobPlan) -> None:
    """Raises: UsageError when node 0 has no port for the ranks to meet at."""
    if not picked.port:
        raise UsageError(
            f"port {plan.master_port} is in use" if plan.master_port else "no TCP port is free",
            where=plan.placement.nodes[0].host.name,
            hint="give another --master-port, or leave it out: a free one is chosen" if plan.master_port else None,
        )
