"""Run a job again after a failure: the same hosts, spare hosts, or the hosts that are left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from launcher.base.errors import ExitCode, TransportError
from launcher.cluster.cluster import Cluster, Host
from launcher.job.events import Watcher
from launcher.job.plan import JobPlan
from launcher.job.report import RunReport

Run = Callable[[JobPlan], RunReport]
Replan = Callable[[Cluster], JobPlan]


@dataclass(frozen=True)
class RestartPolicy:
    """When to start again, and on what."""

    max_restarts: int = 0
    min_nodes: int | None = None  # go on with fewer hosts, but not with fewer than these; None: all are needed
    spares: tuple[Host, ...] = ()  # take the place of lost hosts, in this order


def run_with_restarts(first: JobPlan, policy: RestartPolicy, run: Run, replan: Replan, watcher: Watcher) -> RunReport:
    """Run `first`, and after a failure again, up to `max_restarts` times. Returns the report of the last run.

    run: runs one plan to its end. replan: makes a plan for other hosts, of the same job. Each run after the first gets
    a folder of its own inside the run folder. Raises: LauncherError when the first start fails.
    """
    plan, spares = first, list(policy.spares)
    report = run(plan)
    for restart in range(1, policy.max_restarts + 1):
        if report.exit_code == ExitCode.OK or report.interrupted_by is not None or report.failure is None:
            return report
        lost = {*report.unconfirmed_hosts, *([report.failure.host] if report.failure.rank is None else [])}
        while True:
            hosts = _next_hosts(plan, lost, spares, policy)
            if hosts is None:
                watcher.warning(f"no restart: {', '.join(sorted(lost))} lost, no spare host, and too few are left")
                return report
            plan = dataclasses.replace(
                replan(Cluster(hosts)) if lost else plan,
                run_folder=first.run_folder / f"restart_{restart}",
                restart=restart,
            )
            watcher.restarting(plan, report)
            try:
                report = run(plan)
                break
            except TransportError as error:
                unreachable = {str(diagnostic.where) for diagnostic in error.diagnostics}
                if not unreachable & {host.name for host in hosts}:
                    raise
                watcher.warning(str(error))
                lost = unreachable
    return report


def _next_hosts(plan: JobPlan, lost: set[str], spares: list[Host], policy: RestartPolicy) -> tuple[Host, ...] | None:
    """Return the hosts of the next run; used spares are taken off the list. None when they are too few."""
    hosts: list[Host] = []
    for node in plan.placement.nodes:
        if node.host.name not in lost:
            hosts.append(node.host)
        elif spares:
            spare = spares.pop(0)
            hosts.append(dataclasses.replace(spare, slots=spare.slots[: node.num_ranks]))
    if len(hosts) == len(plan.placement.nodes):
        return tuple(hosts)
    enough = policy.min_nodes is not None and len(hosts) >= policy.min_nodes
    return tuple(hosts) if enough else None
