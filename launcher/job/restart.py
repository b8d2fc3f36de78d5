"""Run a job again after a failure: the same hosts, spare hosts, or the hosts that are left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass

from launcher.base.errors import ConfigError, LauncherError, TransportError
from launcher.base.exit_codes import ExitCode
from launcher.cluster.cluster import Cluster, Host
from launcher.job.events import Watcher
from launcher.job.plan import JobPlan
from launcher.job.report import RunReport

Run = Callable[[JobPlan], RunReport]
Replan = Callable[[Cluster], JobPlan]
# Returns the numbers of ranks the job's config fits, None when it fits any. Raises: ConfigError.
WorldSizes = Callable[[], Collection[int] | None]


@dataclass(frozen=True)
class RestartPolicy:
    """When to start again, and on what."""

    max_restarts: int = 0
    min_nodes: int | None = None  # go on with fewer hosts, but not with fewer than these; None: all are needed
    spares: tuple[Host, ...] = ()  # take the place of lost hosts, in this order
    world_sizes: WorldSizes = lambda: None  # asked before each start on other hosts


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
            try:
                hosts = _next_hosts(plan, lost, spares, policy, watcher) if lost else _hosts_of(plan)
            except LauncherError as error:
                watcher.warning(f"no restart: {error}")
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


def _hosts_of(plan: JobPlan) -> tuple[Host, ...]:
    return tuple(node.host for node in plan.placement.nodes)


def _next_hosts(
    plan: JobPlan, lost: set[str], spares: list[Host], policy: RestartPolicy, watcher: Watcher
) -> tuple[Host, ...]:
    """Return the hosts of the next run; used spares are taken off the list, hosts left out are put on it.

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
            watcher.warning(f"{host.name} was lost: {spare.name} takes its place")
    min_nodes = len(before) if policy.min_nodes is None else min(policy.min_nodes, len(before))
    if len(hosts) < min_nodes:
        raise LauncherError(f"{', '.join(sorted(lost))} lost, no spare host, and too few are left")
    world_sizes = policy.world_sizes()
    if world_sizes is None:
        return tuple(hosts)
    from launcher.job.fit import largest_fit

    chosen = largest_fit(tuple(hosts), world_sizes, min_nodes)
    if chosen is None:
        num_ranks = sum(len(host.slots) for host in hosts)
        raise ConfigError(
            f"elasticity allows no world of {min_nodes} or more of the hosts that are left ({num_ranks} ranks in all)",
            hint=f"it allows {', '.join(str(size) for size in sorted(world_sizes)[:20])} ranks",
        )
    left_out = [host for host in hosts if host not in chosen]
    if left_out:
        spares += left_out
        watcher.warning(f"left out, so that the world size fits: {', '.join(host.name for host in left_out)}")
    return chosen
