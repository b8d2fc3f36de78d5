"""One job: from what a user asked for to the report of its last run."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.folders import home_folder
from launcher.fleet.signals import SignalQueue
from launcher.job.controller import Controller
from launcher.job.display import Display
from launcher.job.engine_config import EngineConfig
from launcher.job.plan import new_job_id
from launcher.job.planning import Here, choose_hosts, make_plan
from launcher.job.reach import AllocationTransports, Transports
from launcher.job.restart import RestartPolicy, run_with_restarts
from launcher.job.variables import job_environment
from launcher.slurm.allocation import in_allocation

if TYPE_CHECKING:
    from launcher.cluster.cluster import Cluster
    from launcher.job.outcome import RunReport
    from launcher.job.plan import JobPlan
    from launcher.job.reach import Reach
    from launcher.job.request import Request
    from launcher.sharding.mesh import MeshSizes
    from launcher.transport.local import LocalTransport
    from launcher.transport.ssh.options import SshOptions


class Job:
    """The hosts of a request, how they are reached, and the plans made for them; then the runs of these plans."""

    def __init__(
        self,
        request: Request,
        here: Here,
        offered: Cluster | None,
        ssh: SshOptions,
        *,
        local: LocalTransport | None = None,
        job_id: str | None = None,
        run_folder: Path | None = None,
    ) -> None:
        """Choose the hosts and read the environment of the ranks; nothing is started, and no host is connected to.

        offered: the hosts to choose from, see `offered_hosts`. local: reaches this machine. job_id, run_folder: given
        where they are known before the job. Raises: LauncherError.
        """
        self._request = request
        self._here = here
        self.choice = choose_hosts(request, here, offered)
        home = home_folder()
        folders = (*([home] if home is not None else []), Path(here.cwd))
        self._environment = job_environment(request.env, request.env_files, here.environ, folders)
        self._config = EngineConfig(request.command.arguments)
        self._job_id = job_id or new_job_id()
        self._run_folder = run_folder
        self.reach: Reach = (
            AllocationTransports(ssh, self.choice.cluster)
            if request.in_slurm
            else Transports(ssh, only_local=request.runs_one_node, only_ssh=request.force_multi, local=local)
        )

    def plan(self, cluster: Cluster | None = None) -> JobPlan:
        """Return the plan for the chosen hosts, or for others. Raises: LauncherError."""
        plan = make_plan(
            self._request,
            self._here,
            cluster or self.choice.cluster,
            self._job_id,
            self._environment,
            self.reach.address_of,
        )
        notes = self.reach.notes_on([node.host for node in plan.placement.nodes])
        return dataclasses.replace(plan, notes=(*plan.notes, *notes), run_folder=self._run_folder or plan.run_folder)

    def mesh_of(self, plan: JobPlan) -> MeshSizes | None:
        """Return the mesh of a plan's ranks, None where the script names no config. Raises: ConfigError."""
        return self._config.check(plan.placement, is_here=plan.is_here)

    def run(self, first: JobPlan, display: Display, signals: SignalQueue) -> RunReport:
        """Run `first` to its end, and again after failures where the request says so; return the last run's report.

        Raises: LauncherError when the first run could not be started.
        """
        config = self._config

        def run_plan(plan: JobPlan) -> RunReport:
            display.wait_for_room()
            self.reach.prepare([node.host for node in plan.placement.nodes])

            def check() -> None:
                config.check(plan.placement, is_here=plan.is_here)

            return Controller(plan, self.reach.for_host, display, signals).run(check)

        max_restarts = self._request.max_restarts
        is_in_slurm = in_allocation(os.environ)
        policy = RestartPolicy(
            max_restarts,
            # Slurm takes the nodes of a job back after a notice: there the batch script has the job queued again.
            max_restarts > 0 and not is_in_slurm,
            is_in_slurm,
            self._request.least_nodes,
            self.choice.spares,
            config.world_sizes,
        )
        return run_with_restarts(first, policy, run_plan, self.plan, display, signals)

    def close(self) -> None:
        """Close every connection."""
        self.reach.close()
