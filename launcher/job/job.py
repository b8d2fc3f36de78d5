"""One job: from what a user asked for to the plans of its runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.folders import home_folder
from launcher.job.engine_config import EngineConfig
from launcher.job.plan import new_job_id
from launcher.job.planning import Here, available_hosts, choose_hosts, make_plan, num_ranks
from launcher.job.reach import Reach, Transports
from launcher.job.variables import job_environment

if TYPE_CHECKING:
    from launcher.cluster.cluster import Cluster
    from launcher.job.plan import JobPlan
    from launcher.job.request import Request
    from launcher.sharding.mesh import MeshSizes
    from launcher.transport.local import LocalTransport
    from launcher.transport.ssh.options import SshOptions


class Job:
    """The hosts of a request, how they are reached, and the plans made for them; `restart.run_job` runs it."""

    def __init__(
        self,
        request: Request,
        here: Here,
        ssh: SshOptions,
        *,
        hosts: Cluster | None = None,
        local: LocalTransport | None = None,
        job_id: str | None = None,
        run_folder: Path | None = None,
    ) -> None:
        """Choose the hosts and read the environment of the ranks; nothing is started, and no host is connected to.

        hosts: to choose from, in place of those that the request names. local: reaches this machine. job_id,
        run_folder: given where they are known before the job. Raises: LauncherError.
        """
        self.request, self.here = request, here
        if hosts is None:
            hosts = available_hosts(request.hostfile, in_slurm=request.in_slurm, num_ranks=num_ranks(request, here))
        self.selection = choose_hosts(request, here, hosts)
        home = home_folder()
        folders = (*([home] if home is not None else []), Path(here.cwd))
        self._environment = job_environment(request.env, request.env_files, here.environ, folders)
        self.config = EngineConfig(request.command.arguments)
        self._job_id = job_id or new_job_id()
        self._run_folder = run_folder
        self.reach: Reach
        if request.in_slurm:
            from launcher.slurm.srun import SrunTransport  # not for other jobs

            self.reach = SrunTransport.of(ssh, self.selection.cluster)
        else:
            self.reach = Transports(ssh, only_local=request.runs_one_node, only_ssh=request.force_multi, local=local)

    def plan(self, cluster: Cluster | None = None) -> JobPlan:
        """Return the plan for the chosen hosts, or for others. Raises: LauncherError."""
        plan = make_plan(
            self.request,
            self.here,
            cluster or self.selection.cluster,
            self._job_id,
            self._environment,
            self.reach.address_of,
        )
        notes = self.reach.notes_on([node.host for node in plan.placement.nodes])
        return dataclasses.replace(plan, notes=(*plan.notes, *notes), run_folder=self._run_folder or plan.run_folder)

    def mesh_of(self, plan: JobPlan) -> MeshSizes | None:
        """Return the mesh of a plan's ranks, None where the script names no config. Raises: ConfigError."""
        return self.config.check(plan.placement, is_here=plan.is_here)

    def close(self) -> None:
        """Close every connection."""
        self.reach.close()
