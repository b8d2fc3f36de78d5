"""Run a job to its end, and again after a failure: on the same hosts, spare hosts, or the remaining hosts."""

from __future__ import annotations

import dataclasses
import itertools
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from launcher.base.errors import ConfigError, LauncherError, TransportError, UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.fields import named
from launcher.base.resume import AUTO
from launcher.cluster.cluster import Cluster, Host
from launcher.cluster.nodeset import is_loopback
from launcher.fleet.signals import SignalQueue
from launcher.job.controller import Controller
from launcher.job.display import Display
from launcher.job.events import RunReport, Watcher
from launcher.job.logs import RunFolder
from launcher.journal.totals import Totals
from launcher.plan.plan import LADDER, JobPlan
from launcher.plan.planning import Job
from launcher.planner.ladder import Rung

Run = Callable[[JobPlan], RunReport]
Replan = Callable[[Cluster], JobPlan]
# Returns the numbers of ranks the job's config fits, None when it fits any. Raises: ConfigError.
WorldSizes = Callable[[], Collection[int] | None]

_MAX_DELAY_S = 30.0
_EXPLAIN_AFTER_S = 1.0
_POLL_S = 0.05
_QUICK_S = 60.0  # a try that fails earlier doubles the delay before the next one


@dataclass(frozen=True)
class RestartPolicy:
    """When to start again, and on what."""

    max_restarts: int = 0  # after failures
    after_notice: bool = False  # start again after ranks saved because of a notice, too: their nodes may stay
    ends_with_notice: bool = False  # after a notice nothing is started again: the nodes will be taken away
    min_nodes: int | None = None  # continue with fewer hosts, but not with fewer than these; None: all are needed
    spares: tuple[Host, ...] = ()  # take the place of lost hosts, in this order
    world_sizes: WorldSizes = lambda: None  # asked before each start on other hosts
    first_delay_s: float = 0.5  # before the first restart, see `delay_s`
    climbs_down: bool = False  # after an end for lack of memory start again with the next rung of the ladder

    def delay_s(self, num_quick: int) -> float:
        """Return how long to wait before a restart. num_quick: failures in a row that came soon after the start.

        Whatever made the job fail may need a moment: a server that starts again, a GPU that is not yet free.
        """
        return float(min(self.first_delay_s * 2 ** min(max(num_quick, 1) - 1, 10), _MAX_DELAY_S))


def run_job(job: Job, first: JobPlan, display: Display, signals: SignalQueue) -> RunReport:
    """Run `first` to its end, and again after failures where the request says so; return the last run's report.

    Raises: LauncherError when the first run could not be started.
    """

    totals = Totals()

    def run(plan: JobPlan) -> RunReport:
        display.wait_for_room()
        job.transports.prepare([node.host for node in plan.placement.nodes])
        return Controller(plan, job.transports.for_host, display, signals, totals).run(lambda: job.mesh_of(plan))

    max_restarts, is_in_slurm = job.request.max_restarts, job.here.in_allocation
    policy = RestartPolicy(
        max_restarts,
        # Slurm takes the nodes of a job back after a notice: there the batch script has the job queued again.
        max_restarts > 0 and not is_in_slurm,
        is_in_slurm,
        job.request.least_nodes,
        job.selection.spares,
        job.config.world_sizes,
        climbs_down=job.request.on_oom == LADDER,
    )
    return run_with_restarts(first, policy, run, job.plan, display, signals)


def run_with_restarts(
    first: JobPlan, policy: RestartPolicy, run: Run, replan: Replan, watcher: Watcher, signals: SignalQueue
) -> RunReport:
    """Run `first`, and after a failure again, up to `max_restarts` times. Returns the report of the last run.

    Ranks that saved and ended because of a notice did not fail: with `after_notice` that start is not counted. Nor is
    one with another rung of the ladder, of which there are only so many.

    run: runs one plan to its end. replan: makes a plan for other hosts, of the same job. signals: a stop signal that
    comes between two runs ends the job as well. Each run after the first gets a folder of its own inside the run
    folder; the report there is the last run's and lists them all. Raises: LauncherError when the first start fails.
    """
    plan, spares = first, list(policy.spares)
    reports = [run(plan)]
    num_quick = 0  # failures in a row that came soon after the start
    num_failures = 0
    for restart in itertools.count(1):
        report = reports[-1]
        rung = _next_rung(report, policy, watcher)
        is_uncounted = rung is not None or (_asks_for_restart(report) and policy.after_notice)
        has_tries = num_failures < policy.max_restarts and not (policy.climbs_down and _ends_ladder(report))
        if not is_uncounted and not (has_tries and _may_restart(report)):
            break
        if policy.ends_with_notice and signals.was_noticed:
            watcher.warning("no restart: the job is about to be preempted")
            break
        lost = _lost_hosts(report)
        rungs = plan.rungs if rung is None else (*plan.rungs, rung.patch)
        num_failures += not is_uncounted
        num_quick = 0 if is_uncounted else num_quick + 1 if report.duration_s < _QUICK_S else 1
        while True:
            try:
                hosts = _next_hosts(plan, lost, spares, policy, watcher) if lost else _hosts_of(plan)
                next_plan = replan(Cluster(hosts)) if lost else plan
                _check_address(plan, next_plan)
            except LauncherError as error:
                watcher.warning(f"no restart: {error}")
                return report
            plan = dataclasses.replace(
                next_plan,
                run_folder=first.run_folder / f"restart_{restart}",
                restart=restart,
                num_failures=num_failures,
                rungs=rungs,
                resume=plan.resume or (AUTO if rungs else ""),
            )
            if signals.first_stop is None:
                watcher.restarting(plan, report)
                _pause(policy.delay_s(num_quick), signals, watcher)
            if signals.first_stop is not None:
                report = dataclasses.replace(report, interrupted_by=signal.Signals(signals.first_stop).name)
                return _saved(first, [*reports[:-1], report], watcher, signals)
            try:
                reports.append(run(plan))
                break
            except TransportError as error:
                unreachable = {str(diagnostic.where) for diagnostic in error.diagnostics}
                if not unreachable & {host.name for host in hosts}:
                    raise
                watcher.warning(str(error))
                lost = unreachable
        _saved(first, reports, watcher, signals)
    return reports[-1]


def _check_address(before: JobPlan, plan: JobPlan) -> None:
    """Raises: UsageError where a plan has the address of a node 0 that it does without."""
    first, now = (each.placement.nodes[0].host.name for each in (before, plan))
    if now != first and plan.master_addr == before.master_addr and not is_loopback(plan.master_addr):
        raise UsageError(
            f"{named('master_addr')} {plan.master_addr} was an address of {first}, and node 0 would be {now} now",
            hint=f"leave {named('master_addr')} out: each start takes an address of its own node 0",
        )


def _saved(first: JobPlan, reports: Sequence[RunReport], watcher: Watcher, signals: SignalQueue) -> RunReport:
    """Write the report of the whole job, and return the last try's. A disk that stalls is waited for, not forever."""
    folder = RunFolder(first, watcher, signals.take_cancel)
    folder.save(reports[-1], reports[:-1])
    folder.release()
    return reports[-1]


def _pause(delay_s: float, signals: SignalQueue, watcher: Watcher) -> None:
    """Wait before a restart; a stop signal ends the wait."""
    if delay_s > _EXPLAIN_AFTER_S:
        watcher.waiting(f"{delay_s:.0f} s before the next try (Ctrl-C: end the job)")
    deadline_s = time.monotonic() + delay_s
    while signals.first_stop is None and time.monotonic() < deadline_s:
        time.sleep(min(_POLL_S, delay_s))


def _asks_for_restart(report: RunReport) -> bool:
    """Return whether the ranks saved and ended in order, because of a notice, to be started again."""
    return report.exit_code == ExitCode.REQUEUE and report.failure is None and report.interrupted_by is None


def _may_restart(report: RunReport) -> bool:
    """Return whether another try makes sense: not after an end in order, an interrupt, or options that are wrong."""
    failure = report.failure
    if report.exit_code == ExitCode.OK or report.interrupted_by is not None or failure is None:
        return False
    return not (failure.is_start_failure and failure.exit_code == ExitCode.USAGE)


def _next_rung(report: RunReport, policy: RestartPolicy, watcher: Watcher) -> Rung | None:
    """Return the rung of the ladder to start again with, None where memory is not what has ended the run."""
    advice = report.advice
    if not policy.climbs_down or advice is None or not _may_restart(report):
        return None
    if not advice.has_ladder:
        watcher.warning("no ladder: the rank had built no engine of this package, so there is no config to change")
    return advice.rung


def _ends_ladder(report: RunReport) -> bool:
    """Whether the job ended for lack of memory, and nothing that needs less of it is left: another try ends alike."""
    return report.advice is not None and report.advice.has_ladder and report.advice.rung is None


def _lost_hosts(report: RunReport) -> set[str]:
    """Return the hosts that the next try must do without: lost ones, and those that could not start their ranks."""
    lost = set(report.unconfirmed_hosts)
    failure = report.failure
    if failure is not None and failure.rank is None and failure.away_s is None:  # a host that ended its ranks in our
        lost.add(failure.host)  # absence is still there
    return lost


def _hosts_of(plan: JobPlan) -> tuple[Host, ...]:
    return tuple(node.host for node in plan.placement.nodes)


def _next_hosts(
    plan: JobPlan, lost: set[str], spares: list[Host], policy: RestartPolicy, watcher: Watcher
) -> tuple[Host, ...]:
    """Return the hosts of the next run; used spares are taken off the list, excluded hosts are put on it.

    Raises: LauncherError when they are too few, or no choice of them makes a world that the config fits.
    """
    before = _hosts_of(plan)
    hosts: list[Host] = []
    for host in before:
        if host.name not in lost:
            hosts.append(host)
        elif spares:
            spare = spares.pop(0)
            hosts.append(dataclasses.replace(spare, slots=spare.slots[: len(host.slots)]))
            watcher.warning(f"{host.name} was lost: replaced by {spare.name}")
    min_nodes = len(before) if policy.min_nodes is None else min(policy.min_nodes, len(before))
    if len(hosts) < min_nodes:
        raise LauncherError(
            f"{', '.join(sorted(lost))} cannot be used, no spare host is left, and too few hosts remain"
        )
    world_sizes = policy.world_sizes()
    if world_sizes is None:
        return tuple(hosts)
    chosen = largest_fit(tuple(hosts), world_sizes, min_nodes)
    if chosen is None:
        num_ranks = sum(len(host.slots) for host in hosts)
        raise ConfigError(
            f"no valid world size on {min_nodes} or more of the remaining hosts ({num_ranks} ranks in all)",
            hint=f"elasticity allows {', '.join(str(size) for size in sorted(world_sizes)[:20])} ranks",
        )
    excluded = [host for host in hosts if host not in chosen]
    if excluded:
        spares += excluded
        watcher.warning(f"excluded to reach a valid world size: {', '.join(host.name for host in excluded)}")
    return chosen


# ---- Which hosts a job continues with when only some world sizes fit its config. Pure ----


def largest_fit(hosts: tuple[Host, ...], world_sizes: Collection[int], min_hosts: int) -> tuple[Host, ...] | None:
    """Return the hosts whose slots together are the largest of `world_sizes`, in their order.

    Hosts that are not needed are left out, the last ones where there is a choice. None when no choice of at least
    `min_hosts` hosts fits.
    """
    kept: dict[int, tuple[Host, ...]] = {0: ()}  # slots together -> the choice with the most hosts
    for host in hosts:
        for slots, choice in sorted(kept.items(), reverse=True):  # a copy, so that a host counts once
            larger = slots + len(host.slots)
            if larger not in kept or len(choice) >= len(kept[larger]):
                kept[larger] = (*choice, host)
    fits = (size for size in kept if size in world_sizes and len(kept[size]) >= min_hosts)
    return kept.get(max(fits, default=-1))
