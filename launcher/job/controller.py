"""Run a job: start the agents, merge what they tell, stop everybody at the first failure.

This thread decides and never waits for a terminal, a disk or a node: what may block has a thread of its own (`display`,
`logs`, `sender`), and what arrives has one for each node (`node.Inbox`).
"""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from launcher.agent.wire import (
    Bye,
    Exited,
    Hello,
    LeftBehind,
    Message,
    Notify,
    Output,
    PickPort,
    PortPicked,
    Progress,
    Raised,
    SpawnFailed,
    Stacks,
    Started,
    Stop,
)
from launcher.base.errors import LauncherError, ProtocolError, UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.signals import NOTICE_SIGNAL
from launcher.base.timeouts import timeouts
from launcher.base.units import format_duration
from launcher.cluster.cluster import Host
from launcher.job.cleanup import sweep_lost_hosts
from launcher.job.display import Display
from launcher.job.exiting import RaisedWatch
from launcher.job.hang import HangWatch, odd_one_out
from launcher.job.liveness import Liveness
from launcher.job.logs import RunFolder
from launcher.job.node import ChannelEnded, Inbox, Node, describe_leftovers
from launcher.job.outcome import RunReport
from launcher.job.plan import PING_INTERVAL_S, JobPlan
from launcher.job.root_cause import FailureBook
from launcher.job.signals import SignalQueue
from launcher.job.stacks import StackCollector
from launcher.job.starting import Start, spawn_message
from launcher.transport.api import Transport

_LOOK_INTERVAL_S = 0.1  # between two looks at all ranks, however many events come in
_BLOCKED_S = 1.0  # a write that takes longer holds the ranks up
_LOGS, _DISPLAY = 0, 1  # the ways of output


class Controller:
    """One run. Use once, from the main thread: `Controller(plan, transport_for, display, signals).run()`."""

    def __init__(
        self, plan: JobPlan, transport_for: Callable[[Host], Transport], watcher: Display, signals: SignalQueue
    ) -> None:
        """signals: listening, and the same for all runs of a job."""
        self._plan = plan
        self._transport_for = transport_for
        self._watcher = watcher
        self._inbox = Inbox(self._take_output)
        self._nodes: list[Node] = []
        self._signals = signals
        self._files = RunFolder(plan, watcher, signals.asks_to_leave)
        self._start_s = time.monotonic()
        self._look_at_s = 0.0
        self._liveness = Liveness(plan.lease_s)
        self._stop_started_s: float | None = None
        self._stop_deadline_s: float | None = None
        self._failures = FailureBook(self._start_s)
        self._raised = RaisedWatch(plan.grace_s)
        self._stopped: set[int] = set()  # ranks that ended after the order to
        self._recorded: set[int] = set()  # ranks whose traceback is in their log
        self._interrupt: int | None = None  # the first signal that stopped the ranks
        self._heard_output_s = self._start_s
        self._hang_watch: HangWatch | None = None
        self._hung: list[int] = []  # ranks that hang, while their stacks are being collected
        self._stacks = StackCollector(plan, watcher, self._files.put)

    def run(self, check: Callable[[], None] | None = None) -> RunReport:
        """Run to the end and return how it went. Signals ask for an orderly stop, a second one for a quick one.

        check: called while the agents start; what it raises ends the run before any rank is started.
        Raises: LauncherError when nothing could be started.
        """
        self._signals.wake = self._inbox.wake
        try:
            try:
                self._connect(check)
                self._spawn()
                self._liveness.watch(self._nodes)
                while not all(node.ended for node in self._nodes):
                    self._turn()
            finally:
                self._release()
            return self._finish()
        finally:
            self._files.release()
            self._nodes.clear()  # channels close what they hold once nobody knows them, also in a notebook

    # ---- start ----

    def _connect(self, check: Callable[[], None] | None) -> None:
        start = Start(self._inbox, self._stop_if_interrupted, self._watcher.waiting)
        self._nodes = start.connect(self._plan, self._transport_for)
        if check is not None:
            check()
        for node, hello in zip(self._nodes, start.expect(self._nodes, Hello, "the agents to answer"), strict=True):
            node.devices = hello.devices
        if self._nodes[0].placement.node_rank == 0:  # it chooses the port, or looks whether the given one is free
            self._nodes[0].send(PickPort(self._plan.master_port or 0))
            (picked,) = start.expect(self._nodes[:1], PortPicked, "a free port")
            _check_port(picked, self._plan)
            self._plan = dataclasses.replace(self._plan, master_port=picked.port)

    def _spawn(self) -> None:
        plan = self._plan
        try:
            self._files.open()
        except LauncherError:
            self._stop_if_interrupted()
            raise
        self._watcher.planned(plan)
        if plan.hang_timeout_s is not None:
            self._hang_watch = HangWatch(plan.hang_timeout_s, plan.placement.ranks, time.monotonic())
        for node in self._nodes:
            node.running = set(node.placement.ranks)
            node.send(spawn_message(plan, node))

    # ---- the loop ----

    def _turn(self) -> None:
        event = self._inbox.get(PING_INTERVAL_S / 2)
        if self._liveness.was_away():
            self._hold_hang_watch()
        if event is not None:
            self._handle(*event)
        self._handle_signals()
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + _LOOK_INTERVAL_S
        self._watcher.check()
        self._files.look(now_s)
        for node, silence_s in self._liveness.silent_nodes(now_s):  # a network separates them from us
            node.ended = True
            node.channel.close()
            self._lose_host(node, f"no word for {silence_s:.0f} s")
        self._check_progress(now_s)
        self._check_raised(now_s)
        if self._stop_deadline_s is not None and now_s > self._stop_deadline_s:
            for node in self._nodes:
                if not node.ended:
                    node.channel.close()  # the agent's lease ends with it
                    node.ended = True

    def _handle(self, node: Node, message: Message | ChannelEnded) -> None:
        if isinstance(message, Progress):
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
        elif isinstance(message, LeftBehind):
            self._watcher.warning(describe_leftovers(node, message))
        elif isinstance(message, SpawnFailed):
            node.running.clear()
            self._failures.add_not_started(node, message)
            self._stop(f"the ranks of {node.name} could not be started ({message.reason})", self._plan.grace_s)
        elif isinstance(message, Bye):
            node.said_bye = True
            node.left_pids = tuple(message.left)
            node.running.clear()
        elif isinstance(message, ChannelEnded):
            node.ended = True
            if not node.said_bye:
                node.channel.close()  # an agent that talks nonsense may live
                self._lose_host(node, message.reason or "the agent ended or the connection was lost")

    def _take_output(self, node: Node, message: Output) -> None:
        """Put output on its two ways. Runs on the thread that reads the node."""
        log = self._files.logs.get(message.rank)
        if log is None or message.rank not in node.placement.ranks:
            raise ProtocolError(f"the agent's stream is damaged: output of rank {message.rank}, which is not there")
        log.remember(message.data)
        node.wrote_s[message.rank] = time.monotonic()
        node.window.arrived(message)
        self._files.write(message.rank, message.data, lambda: node.handled(message, _LOGS))
        self._watcher.output(message.rank, message.stream, message.data)
        self._watcher.put(node.handled, message, _DISPLAY)

    def _on_raised(self, node: Node, message: Raised) -> None:
        """Keep what a rank has raised, and wait for its end: exit handlers have the grace for what they do."""
        self._write_traceback(message.rank, message.record)
        self._failures.add_raised(node, message, self._files.logs[message.rank])
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
            self._hang_watch.ended(message.rank, time.monotonic())
        if self._stop_started_s is not None:
            self._stopped.add(message.rank)
        failure = self._failures.add_exit(node, message, self._files.logs[message.rank])
        if message.record is not None:
            self._write_traceback(message.rank, message.record)
        if failure is not None:
            self._stop(f"rank {message.rank} failed ({failure.reason})", self._plan.grace_s)

    def _write_traceback(self, rank: int, record: dict[str, Any]) -> None:
        """Complete a rank's log, once: its worker leaves the traceback to us."""
        if rank not in self._recorded:
            self._recorded.add(rank)
            self._files.write(rank, str(record.get("traceback", "")).encode("utf-8", "backslashreplace"))

    def _lose_host(self, node: Node, reason: str) -> None:
        away_s = self._liveness.away_s
        if node.has_lease and away_s is not None:
            self._failures.add_absence(node, away_s)
            self._stop("launch was suspended for longer than the lease", self._plan.grace_s)
            return
        self._failures.add_host(node, reason)
        self._stop(f"{node.name} failed ({reason})", self._plan.grace_s)

    # ---- hangs ----

    def _check_progress(self, now_s: float) -> None:
        """Find out that a rank hangs; when its stacks are there, name it and stop."""
        watch = self._hang_watch
        if watch is None or self._stop_started_s is not None:
            self._stacks.take(self._nodes)
            return
        self._hear_output(watch, now_s)
        if not self._hung and (hung := watch.hung_ranks(now_s)):
            self._hung = hung
            self._watcher.warning(f"no progress for {self._plan.hang_timeout_s:g} s: asking all ranks for their stacks")
            self._stacks.ask(self._nodes)
        stacks = self._stacks.take(self._nodes)
        if stacks is None or not self._hung:
            return
        self._hung = watch.hung_ranks(now_s)  # what has moved meanwhile does not hang
        if self._hung:
            self._end_hang(odd_one_out(stacks, watch.counts, self._hung), stacks)

    def _end_hang(self, odd: int | None, stacks: dict[int, str]) -> None:
        """Stop the job because of the ranks that hang. odd: the one the others wait for, None: they look alike."""
        rank = odd if odd is not None else min(self._hung)
        node = next(node for node in self._nodes if rank in node.placement.ranks)
        reason = f"no progress for {self._plan.hang_timeout_s:g} s" + (", all ranks alike" if odd is None else "")
        self._failures.add_hang(node, rank, reason, stacks.get(rank, ""), self._files.logs[rank])
        self._stop(f"rank {rank} hangs ({reason})", self._plan.grace_s)

    def _hear_output(self, watch: HangWatch, now_s: float) -> None:
        """Tell the watch which ranks wrote, and that ranks which wait for our own display or disk do not hang."""
        is_blocked = max(self._watcher.stalled_s, self._files.stalled_s) > _BLOCKED_S
        is_held_up = is_blocked and any(node.window.is_half_full for node in self._nodes)
        if is_held_up:
            self._hold_hang_watch()
        since_s, self._heard_output_s = self._heard_output_s, now_s
        for node in self._nodes:
            for rank in node.running:
                if node.wrote_s.get(rank, 0.0) >= since_s:
                    watch.output(rank, node.wrote_s[rank])

    def _hold_hang_watch(self) -> None:
        """Count standstill from now on: the ranks had to wait for us."""
        if self._hang_watch is not None:
            self._hang_watch.hold(time.monotonic())

    # ---- stop ----

    def _stop(self, why: str, grace_s: float, *, by_user: bool = False) -> None:
        """Order all agents to end their ranks. After a failure only the first order counts; a user may insist."""
        if self._stop_started_s is not None and not by_user:
            return
        now_s = time.monotonic()
        self._failures.stop_ordered(by_user=by_user)
        if any(node.running for node in self._nodes) and (by_user or self._stop_started_s is None):
            self._watcher.stopping(why)
        self._stop_started_s = self._stop_started_s or now_s
        self._stop_deadline_s = min(self._stop_deadline_s or math.inf, now_s + grace_s + timeouts().goodbye_s)
        for node in self._nodes:
            if not node.ended:
                node.send(Stop(grace_s))

    def _handle_signals(self) -> None:
        if self._signals.wants_suspension:
            self._suspend()
        for number in self._signals.take():
            if number not in self._plan.stop_signals:
                if number == NOTICE_SIGNAL:
                    self._pass_notice_on()
                else:
                    self._stacks.ask(self._nodes)
                continue
            name = signal.Signals(number).name
            is_first = self._interrupt is None
            self._interrupt = self._interrupt or number
            why = f"{name}: stopping all ranks" if is_first else f"{name} again: killing all ranks"
            self._stop(why, self._plan.grace_s if is_first else 0.0, by_user=True)
            if is_first and self._plan.grace_s > 0 and any(node.running for node in self._nodes):
                grace = format_duration(self._plan.grace_s)
                self._watcher.waiting(f"the ranks to end, at most {grace}; a second {name} kills them")

    def _pass_notice_on(self) -> None:
        """Tell all ranks that the job will be preempted; what they exit with from now on may ask for a requeue."""
        self._watcher.warning(f"{NOTICE_SIGNAL.name}: the job is about to be preempted, telling all ranks")
        self._failures.was_noticed = True
        for node in self._nodes:
            if node.running:
                node.send(Notify())

    def _suspend(self) -> None:
        """Do what Ctrl-Z asks for. Agents are told first: the ranks are to be there when the user comes back."""
        self._watcher.suspending()
        shown = threading.Event()
        self._watcher.put(shown.set)
        away_s = self._liveness.suspended(self._signals.suspend, shown.is_set, self._handle_next)
        self._hold_hang_watch()
        self._watcher.continuing(away_s)

    def _handle_next(self) -> None:
        event = self._inbox.get(_LOOK_INTERVAL_S / 2)
        if event is not None:
            self._handle(*event)

    def _stop_if_interrupted(self) -> None:
        if self._signals.wants_suspension:
            self._signals.suspend()
        number = self._signals.first_stop
        if number is not None:
            error = LauncherError(f"{signal.Signals(number).name} before any rank was started")
            error.exit_code = 128 + number
            raise error

    # ---- end ----

    def _release(self) -> None:
        """Let go of agents and logs: also when something failed half-way, nothing may stay behind."""
        for node in self._nodes:
            node.close_stdin()
        # One for all; agents that have no ranks need not be waited for.
        deadline_s = time.monotonic() + (self._plan.grace_s if self._files.logs else 0.0)
        for node in self._nodes:
            if not node.ended:
                node.channel.wait(max(0.0, deadline_s - time.monotonic()))
            node.channel.close()

    def _finish(self) -> RunReport:
        end_s = time.monotonic()
        lost = [node.placement.host for node in self._nodes if not node.said_bye]
        unconfirmed = sweep_lost_hosts(
            lost, self._transport_for, self._plan.job_id, self._watcher.waiting, self._signals.asks_to_leave
        )
        self._files.close()
        failure, interrupt = self._failures.cause, self._interrupt
        report = RunReport(
            job_id=self._plan.job_id,
            exit_code=_exit_code(self._failures, interrupt),
            world_size=self._plan.placement.world_size,
            duration_s=time.monotonic() - self._start_s,
            interrupted_by=signal.Signals(interrupt).name if interrupt is not None else None,
            failure=failure,
            num_stopped=len(self._stopped - {failure.rank if failure is not None else None}),
            stop_s=end_s - self._stop_started_s if self._stop_started_s is not None else 0.0,
            unconfirmed_hosts=unconfirmed,
            swept_hosts=tuple(host.name for host in lost if host.name not in unconfirmed),
            left_pids=tuple((node.name, node.left_pids) for node in self._nodes if node.left_pids),
            restart=self._plan.restart,
        )
        try:
            self._files.make(lambda: report.save(self._plan.run_folder))
        except OSError as error:
            self._watcher.warning(f"report.json could not be written: {error.strerror}")
        except LauncherError as error:
            self._watcher.warning(f"report.json could not be written: {error.diagnostics[0].message}")
        return report


def _exit_code(failures: FailureBook, interrupt: int | None) -> int:
    """Return what `launch` exits with. interrupt: the signal that stopped the ranks."""
    if failures.cause is not None:
        return failures.cause.exit_code
    if interrupt is not None:
        return 128 + interrupt
    return int(ExitCode.REQUEUE if failures.wants_requeue else ExitCode.OK)


def _check_port(picked: PortPicked, plan: JobPlan) -> None:
    """Raises: UsageError when node 0 has no port for the ranks to meet at."""
    if not picked.port:
        raise UsageError(
            f"port {plan.master_port} is in use" if plan.master_port else "no TCP port is free",
            where=plan.placement.nodes[0].host.name,
            hint="give another --master-port, or leave it out: a free one is chosen" if plan.master_port else None,
        )
