"""Run a job: start the ranks of all hosts, pass on what they write, stop everybody at the first failure.

This thread decides and never waits for a terminal, a disk or a host: what may block has a thread of its own (`display`,
`logs`, and in `launcher.fleet` those that connect, read and write).
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from launcher.agent.wire import (
    Bye,
    Exited,
    LeftBehind,
    Notify,
    PickPort,
    PortPicked,
    Progress,
    Raised,
    SpawnFailed,
    Stacks,
    Started,
    TryMaster,
)
from launcher.base.errors import Diagnostic, LauncherError, TransportError, UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.fields import named
from launcher.base.progress import RankProgress
from launcher.base.signals import NOTICE_SIGNAL
from launcher.base.timeouts import timeouts
from launcher.base.units import format_duration
from launcher.cluster.cluster import Host
from launcher.cluster.nodeset import fold
from launcher.fleet.agent_link import HEARTBEAT_INTERVAL_S
from launcher.fleet.fleet import Fleet, sweep_lost_hosts
from launcher.fleet.host_link import Event, HostEnded
from launcher.fleet.signals import NATIVE_STACKS_SIGNAL, SignalQueue
from launcher.job.display import Display
from launcher.job.events import Failure, RunReport
from launcher.job.hang import HangWatch, StackCollector, name_hang
from launcher.job.journal import RunJournal
from launcher.job.logs import RunFolder
from launcher.job.node import Node, Rank, describe_leftovers, pieces_of
from launcher.job.root_cause import RootCause
from launcher.job.traces import TraceDesk
from launcher.job.verdicts import RunVerdicts
from launcher.journal.faults import PREEMPT
from launcher.journal.totals import Totals
from launcher.plan.plan import JobPlan
from launcher.planner.ladder import Advice, advice_for
from launcher.transport.api import Transport

_LOOK_INTERVAL_S = 0.1  # between two looks at all ranks, however many events come in
_BLOCKED_S = 1.0  # a write that takes longer holds the ranks up
# Most ranks that have raised end within this, with an interpreter full of transformers too; then the user is warned.
_WARN_OF_EXIT_S = 2.0
# Slurm's SIGTERM comes to all nodes, and each agent ends its ranks then: a stop message would signal them twice.
_SLURM_TERM_S = 1.0


class Controller:
    """One run. Use once, on one thread: `Controller(plan, transport_for, display, signals).run()`."""

    def __init__(
        self,
        plan: JobPlan,
        transport_for: Callable[[Host], Transport],
        watcher: Display,
        signals: SignalQueue,
        totals: Totals | None = None,
    ) -> None:
        """signals: listening, and the same for all runs of a job, as `totals`: what these have trained."""
        self._plan = plan
        self._transport_for = transport_for
        self._watcher = watcher
        self._signals = signals
        self._files = RunFolder(plan, watcher, signals.take_cancel)
        self._journal = RunJournal(plan, self._files, watcher.warning)
        self._verdicts = RunVerdicts(self._journal, watcher, totals or Totals(), self._rehearse_fault)
        self._traces = TraceDesk(plan, self._files, lambda: self._fleet.wake())
        self._fleet = Fleet(
            [
                Node(placement, plan, self._files, self._journal, self._traces, watcher)
                for placement in plan.placement.nodes
            ],
            transport_for,
            lease_s=plan.lease_s,
            goodbye_s=timeouts().goodbye_s,
            on_waiting=watcher.waiting,
            is_interrupted=self._end_if_interrupted,
        )
        self._nodes = self._fleet.links
        self._ranks: list[Rank] = []  # filled when they are started
        self._start_s = time.monotonic()
        self._look_at_s = 0.0
        self._has_news = False  # events since the last look
        self._stop_started_s: float | None = None
        self._interrupt: int | None = None  # the first signal that stopped the ranks
        self._late_stop_s = math.inf  # when agents are asked to end ranks that Slurm has signalled
        self._root_cause = RootCause(self._start_s)
        self._has_warned_of_exit = False
        self._stacks = StackCollector(plan, watcher, self._files.put)
        self._hang_watch: HangWatch | None = None
        self._hung: list[Rank] = []  # while their stacks are being collected

    def run(self, check: Callable[[], object] | None = None) -> RunReport:
        """Run to the end and return how it went. Signals ask for an orderly stop, a second one for a quick one.

        check: called while the agents start; what it raises ends the run before any rank is started.
        Raises: LauncherError when nothing could be started.
        """
        self._signals.wake = self._fleet.wake
        try:
            try:
                self._connect(check)
                self._spawn()
                self._fleet.liveness.begin()
                while not self._fleet.is_over:
                    self._turn()
            except BaseException:
                self._abandon()
                raise
            self._fleet.close()
            return self._finish()
        finally:
            self._files.release()
            self._nodes.clear()  # channels close what they hold once nothing refers to them, also in a notebook

    # ---- start ----

    def _connect(self, check: Callable[[], object] | None) -> None:
        fleet, first, limit_s = self._fleet, self._nodes[0], timeouts().answer_s
        fleet.connect()
        if check is not None:
            check()
        fleet.wait(lambda node: node.hello is not None, "the agents to answer", limit_s=limit_s)
        if first.placement.node_rank == 0:  # it chooses the port, or looks whether the given one is free
            first.send(PickPort(self._plan.master_port or 0))
            fleet.wait(lambda node: node.picked is not None, "a free port", [first], limit_s)
            self._plan = dataclasses.replace(self._plan, master_port=_picked_port(first.picked, self._plan))
        if self._plan.placement.num_nodes > 1:
            self._try_master(limit_s)

    def _try_master(self, limit_s: float) -> None:
        """Find out that ranks could not meet, before there are any. Raises: TransportError."""
        plan = self._plan
        # Where each node runs its own command, node 0 may be there later, its name too; its ranks may listen already.
        is_alone = bool(plan.placement.elsewhere)
        for node in self._nodes:
            node.send(TryMaster(plan.master_addr, 0 if is_alone else plan.master_port or 0))
        self._fleet.wait(lambda node: node.master is not None, f"{plan.master_addr} to be reached", limit_s=limit_s)
        tried = {node.name: node.master.problem for node in self._nodes if node.master is not None}
        found = master_findings(plan, {name: problem for name, problem in tried.items() if problem is not None})
        # Slurm has names for nodes that need not be those of the network; what runs there may not need any.
        if found and not is_alone and "srun" not in plan.transports.values():
            raise TransportError.from_diagnostics(found)
        for finding in found:
            self._watcher.warning(str(finding))

    def _spawn(self) -> None:
        plan = self._plan
        try:
            logs = self._files.open()
        except LauncherError:
            self._end_if_interrupted()
            raise
        self._journal.begin()
        self._watcher.planned(plan)
        now_s, pieces = time.monotonic(), pieces_of(plan.command.call)
        orders = [node.spawn_message(plan) for node in self._nodes]  # all, before any rank runs: one may be refused
        for node, order in zip(self._nodes, orders, strict=True):
            node.ranks = {number: Rank(number, logs[number], now_s) for number in node.placement.ranks}
            self._ranks += node.ranks.values()
            node.start_ranks(pieces, order)
        if plan.hang_timeout_s is not None:
            self._hang_watch = HangWatch(plan.hang_timeout_s, self._ranks, now_s)

    def _end_if_interrupted(self) -> None:
        if self._signals.wants_suspension:
            self._signals.suspend()
        number = self._signals.first_stop
        if number is not None:
            error = LauncherError(f"{signal.Signals(number).name} before any rank was started")
            error.exit_code = 128 + number
            raise error

    # ---- the loop ----

    def _turn(self) -> None:
        until_look_s = max(0.0, self._look_at_s - time.monotonic())
        found = self._fleet.get(until_look_s if self._has_news else HEARTBEAT_INTERVAL_S / 2)
        if self._fleet.liveness.was_away():
            self._hold_hang_watch()
        if found is not None:
            self._has_news = True
            self._handle(*found)
        self._handle_signals()
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s, self._has_news = now_s + _LOOK_INTERVAL_S, False
        self._watcher.check()
        self._files.look(now_s)
        self._journal.look(now_s, lambda: {node.name: node.clock_offset_s for node in self._nodes})
        if (order := self._traces.look(now_s)) is not None:
            for node in self._nodes:
                if node.has_running_ranks:
                    node.send(order)
        for node, error in self._fleet.lost(now_s):  # a network separates them from us
            self._lose_host(node, str(error))
        self._verdicts.look(now_s)
        self._check_progress(now_s)
        self._check_raised(now_s)
        if now_s >= self._late_stop_s:
            self._fleet.stop(self._plan.grace_s - _SLURM_TERM_S)
            self._late_stop_s = math.inf
        self._fleet.overdue(now_s)

    def _handle(self, node: Node, event: Event) -> None:
        if isinstance(event, Progress):
            if self._hang_watch is not None:
                self._hang_watch.beat(node.ranks[event.rank], event.count, time.monotonic())
            node.ranks[event.rank].phase = event.phase
            progress = RankProgress(event.count, event.step, event.loss, event.phase, event.total_steps)
            self._watcher.progress(event.rank, progress)
            self._journal.note_progress(event.rank, progress)
        elif isinstance(event, Stacks):
            self._stacks.take(node.ranks[event.rank], event)
        elif isinstance(event, Started):
            node.ranks[event.rank].pid = event.pid
            self._watcher.started(event.rank)
            self._journal.add("start", rank=event.rank, pid=event.pid, host=node.name)
        elif isinstance(event, Raised):
            self._on_raised(node, node.ranks[event.rank], event)
        elif isinstance(event, Exited):
            self._on_exit(node, node.ranks[event.rank], event)
        elif isinstance(event, LeftBehind):
            self._watcher.warning(describe_leftovers(node, event))
        elif isinstance(event, SpawnFailed):
            self._root_cause.add_not_started(node, event)
            self._forget_ranks(node)
            self._stop(f"the ranks of {node.name} could not be started ({event.reason})", self._plan.grace_s)
        elif isinstance(event, Bye):
            self._forget_ranks(node)
        elif isinstance(event, HostEnded) and not node.exited_cleanly:
            self._lose_host(node, str(event.error))

    def _on_raised(self, node: Node, rank: Rank, message: Raised) -> None:
        """Keep what a rank has raised, and wait for its end: exit handlers have the grace for what they do."""
        record = message.record
        self._journal.add("raised", rank=rank.number, type=record.get("type"), message=record.get("message"))
        self._write_traceback(rank, message.record)
        self._root_cause.add_raised(node, rank, message)
        rank.raised_s = rank.raised_s or time.monotonic()

    def _check_raised(self, now_s: float) -> None:
        """Warn of ranks that have failed but do not exit; after their time is over, stop the job."""
        cause = self._root_cause.cause
        if cause is None or self._stop_started_s is not None:
            return
        since_s = [rank.raised_s for rank in self._ranks if rank.is_running and rank.raised_s is not None]
        longest_s = now_s - min(since_s, default=now_s)
        if longest_s >= _WARN_OF_EXIT_S and not self._has_warned_of_exit:
            self._has_warned_of_exit = True
            self._watcher.raised(cause)
        if longest_s >= max(self._plan.grace_s, _WARN_OF_EXIT_S):
            self._stop(f"rank {cause.rank} failed ({cause.reason}) but has not exited", self._plan.grace_s)

    def _on_exit(self, node: Node, rank: Rank, message: Exited) -> None:
        rank.is_running = False
        rank.was_stopped = self._stop_started_s is not None
        self._watcher.ended(message.rank, message.status)
        self._journal.add("exit", rank=rank.number, status=message.status, max_rss_bytes=message.max_rss_bytes)
        if self._hang_watch is not None:
            self._hang_watch.ended(time.monotonic())
        failure = self._root_cause.add_exit(node, rank, message)
        if message.record is not None:
            self._write_traceback(rank, message.record)
        if message.torch_error is not None:
            data, path = json.dumps(message.torch_error).encode(), rank.log.path.with_suffix(".error.json")
            self._files.put_file(path, data)
        if failure is not None:
            self._stop(f"rank {message.rank} failed ({failure.reason})", self._plan.grace_s)

    def _write_traceback(self, rank: Rank, record: dict[str, Any]) -> None:
        """Complete a rank's log, once: its worker leaves the traceback to us."""
        if not rank.has_traceback:
            rank.has_traceback = True
            self._files.write(rank.log, str(record.get("traceback", "")).encode("utf-8", "backslashreplace"))

    @staticmethod
    def _forget_ranks(node: Node) -> None:
        for rank in node.ranks.values():
            rank.is_running = False

    def _lose_host(self, node: Node, reason: str) -> None:
        away_s = self._fleet.liveness.away_s
        if node.has_lease and away_s is not None:
            self._root_cause.add_absence(node, away_s)
            self._stop("launch was suspended for longer than the lease", self._plan.grace_s)
            return
        self._root_cause.add_host(node, reason)
        self._journal.add("host_lost", host=node.name, reason=reason)
        self._stop(f"{node.name} failed ({reason})", self._plan.grace_s)

    # ---- hangs ----

    def _check_progress(self, now_s: float) -> None:
        """Find out that a rank hangs; when its stacks are there, name it and stop."""
        watch = self._hang_watch
        if watch is None or self._stop_started_s is not None:
            self._stacks.is_done(self._ranks)
            return
        is_blocked = max(self._watcher.stalled_s, self._files.stalled_s) > _BLOCKED_S
        if is_blocked and any(node.window.is_half_full for node in self._nodes):
            self._hold_hang_watch()  # ranks that wait for our own display or disk do not hang
        hung = watch.hung_ranks(now_s)
        if hung and not self._hung:
            self._hung = hung
            text = f"no progress for {self._plan.hang_timeout_s:g} s: asking all ranks for their stacks"
            self._watcher.warning(text)
            self._journal.add("notice", text=text)
            self._stacks.request(self._nodes)
        if self._stacks.is_done(self._ranks) and self._hung:
            self._hung = hung  # what has moved meanwhile does not hang
            if hung:
                self._end_hang(hung)

    def _end_hang(self, hung: list[Rank]) -> None:
        """Stop the job because of the ranks that hang."""
        stuck = self._stacks.stuck
        rank, reason = name_hang(hung, self._ranks, stuck, self._plan.hang_timeout_s or 0.0)
        node = next(node for node in self._nodes if rank.number in node.ranks)
        self._root_cause.add_hang(node, rank, reason, stuck)
        self._stop(f"rank {rank.number} " + (reason if stuck else f"hangs ({reason})"), self._plan.grace_s)

    def _hold_hang_watch(self) -> None:
        """Count the silence of ranks from now on: they had to wait for us."""
        if self._hang_watch is not None:
            self._hang_watch.hold(time.monotonic())

    # ---- stop ----

    def _stop(self, why: str, grace_s: float, *, by_user: bool = False) -> None:
        """Ask all agents to end their ranks. After a failure only the first request counts; a user may insist."""
        if self._stop_started_s is not None and not by_user:
            return
        self._root_cause.stopping(by_user=by_user)
        self._journal.add("stopping", text=why)
        if self._has_running_ranks:
            self._watcher.stopping(why)
        self._stop_started_s = self._stop_started_s or time.monotonic()
        if grace_s == 0 or self._late_stop_s == math.inf:
            self._fleet.stop(grace_s)

    @property
    def _has_running_ranks(self) -> bool:
        return any(rank.is_running for rank in self._ranks)

    def _handle_signals(self) -> None:
        if self._signals.wants_suspension:
            self._suspend()
        for number in self._signals.take():
            if number in self._plan.stop_signals:
                self._stop_by_signal(number)
            elif number == NOTICE_SIGNAL:
                self._pass_notice_on()
            else:
                self._stacks.request(self._nodes, native=number == NATIVE_STACKS_SIGNAL)

    def _stop_by_signal(self, number: int) -> None:
        name, is_first = signal.Signals(number).name, self._interrupt is None
        self._interrupt = self._interrupt or number
        why = f"{name}: stopping all ranks" if is_first else f"{name} again: killing all ranks"
        grace_s = self._plan.grace_s if is_first else 0.0
        if number == signal.SIGTERM and grace_s > _SLURM_TERM_S and "srun" in self._plan.transports.values():
            self._late_stop_s = time.monotonic() + _SLURM_TERM_S
        self._stop(why, grace_s, by_user=True)
        if is_first and self._plan.grace_s > 0 and self._has_running_ranks:
            grace = format_duration(self._plan.grace_s)
            self._watcher.waiting(f"the ranks to end, at most {grace}; a second {name} kills them")

    def _pass_notice_on(self) -> None:
        """Warn all ranks that the job will be preempted; what they exit with from now on may ask for a requeue."""
        self._watcher.warning("notice: the job is about to be preempted, warning all ranks")
        self._journal.add("notice", text="the job is about to be preempted")
        self._root_cause.was_warned = True
        for node in self._nodes:
            if node.has_running_ranks:
                node.send(Notify())

    def _rehearse_fault(self, name: str) -> None:
        """Do the launcher's part of a fault that a rank has begun, see `journal.faults`. Any thread."""
        if name == PREEMPT:
            self._signals.ask(NOTICE_SIGNAL)

    def _suspend(self) -> None:
        """Do what Ctrl-Z asks for. Agents hear of it first: the ranks are to be there when the user comes back."""
        self._watcher.suspending()
        shown = threading.Event()
        self._watcher.put(shown.set)
        away_s = self._fleet.liveness.suspended(self._signals.suspend, shown.is_set, self._handle_next)
        self._hold_hang_watch()
        self._watcher.continuing(away_s)

    def _handle_next(self) -> None:
        found = self._fleet.get(_LOOK_INTERVAL_S / 2)
        if found is not None:
            self._handle(*found)

    # ---- end ----

    def _abandon(self) -> None:
        """End what runs although an error, of a watcher above all, has ended the run: nothing may stay behind."""
        if not self._ranks:
            self._fleet.close()
            return
        # Agents leave earlier by themselves: they end their ranks once nothing more can come.
        self._fleet.close(self._plan.grace_s + timeouts().goodbye_s, self._signals.take_cancel)
        self._sweep()

    def _sweep(self) -> tuple[list[Host], tuple[str, ...]]:
        """Return the hosts that have not said that nothing is left, and those that could not confirm it since."""
        lost = [node.host for node in self._nodes if not node.exited_cleanly]
        return lost, sweep_lost_hosts(
            lost, self._transport_for, self._plan.job_id, self._watcher.waiting, self._signals.take_cancel
        )

    def _finish(self) -> RunReport:
        end_s = time.monotonic()
        lost, unconfirmed = self._sweep()
        failure, interrupt = self._root_cause.cause, self._interrupt
        num_stopped = sum(rank.was_stopped and (failure is None or rank.number != failure.rank) for rank in self._ranks)
        report = RunReport(
            job_id=self._plan.job_id,
            exit_code=_exit_code(self._root_cause, interrupt),
            world_size=self._plan.placement.world_size,
            duration_s=time.monotonic() - self._start_s,
            interrupted_by=signal.Signals(interrupt).name if interrupt is not None else None,
            failure=failure,
            num_stopped=num_stopped,
            stop_s=end_s - self._stop_started_s if self._stop_started_s is not None else 0.0,
            unconfirmed_hosts=unconfirmed,
            cleaned_hosts=tuple(host.name for host in lost if host.name not in unconfirmed),
            left_pids=tuple((node.name, node.left_pids) for node in self._nodes if node.left_pids),
            restart=self._plan.restart,
            advice=_advice(failure, self._plan),
        )
        verdicts, training = self._verdicts.end(self._journal.end_of(report), self._signals.take_cancel)
        report = dataclasses.replace(report, verdicts=verdicts, training=training)
        self._journal.end(report)
        self._journal.close()
        self._files.close()
        self._files.save(report)
        return report


def master_findings(plan: JobPlan, problems: Mapping[str, str]) -> list[Diagnostic]:
    """Return why ranks would not meet, of each host that does not reach the address; of node 0 where no host does.

    problems: by host. A restart does without the hosts that are named: the others are not lost where it is node 0 that
    is cut off. Of two hosts nothing says which is.
    """
    first, *others = (node.host.name for node in plan.placement.nodes)
    what = f"{plan.master_addr}, where ranks are to meet,"
    hint = f"give {named('master_addr')} an address of {first} that all hosts reach"
    if not (others and problems.keys() >= set(others) and len(problems) > 1):
        return [Diagnostic(f"{what} {problem} there", name, hint) for name, problem in problems.items()]
    alike: dict[str, list[str]] = {}
    for name, problem in problems.items():
        alike.setdefault(problem, []).append(name)
    words = "; ".join(f"{problem} on {fold(names)}" for problem, names in alike.items())
    return [Diagnostic(f"{what} {words}", first, hint)]


def _picked_port(picked: PortPicked | None, plan: JobPlan) -> int:
    """Return the port for the ranks to meet at. picked: what the agent of node 0 answered. Raises: UsageError."""
    if picked is not None and picked.port:
        return picked.port
    wanted, problem = plan.master_port, picked.problem if picked is not None else None
    raise UsageError(
        f"port {wanted} {problem or 'is in use'}" if wanted else "no TCP port is free",
        where=plan.placement.nodes[0].host.name,
        hint=f"give another {named('master_port')}, or leave it out: a free one is chosen" if wanted else None,
    )


def _advice(failure: Failure | None, plan: JobPlan) -> Advice | None:
    """Return what needs less memory, where a lack of it was the failure."""
    if failure is None or failure.memory is None:
        return None
    advice = advice_for(failure.memory, failure.engine, plan.rungs)
    if advice.rung is None or failure.engine is None:
        return advice
    from launcher.planner.settings import freed_bytes  # pydantic: not for runs that end well

    return dataclasses.replace(advice, freed_bytes=freed_bytes(failure.engine, advice.rung.patch))


def _exit_code(root_cause: RootCause, interrupt: int | None) -> int:
    """Return what `launch` exits with. interrupt: the signal that stopped the ranks."""
    if root_cause.cause is not None:
        return root_cause.cause.exit_code
    if interrupt is not None:
        return 128 + interrupt
    return int(ExitCode.REQUEUE if root_cause.wants_requeue else ExitCode.OK)
