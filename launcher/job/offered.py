"""The hosts that a command may choose from: those of a hostfile, or of the Slurm allocation it runs in."""

from __future__ import annotations

import os

from launcher.base import env
from launcher.base.errors import HostfileError, TransportError
from launcher.cluster.cluster import Cluster


def offered_hosts(hostfile: str | None, *, in_slurm: bool, num_ranks: int | None = None) -> Cluster | None:
    """Return the hosts and their slots, None where there is this machine alone. Reads files, and asks Slurm.

    num_ranks: slots of each host where Slurm gave no GPUs. Raises: HostfileError, UsageError.
    """
    if hostfile is not None:
        from launcher.cluster.hostfile import read_hostfile

        return read_hostfile(hostfile)
    if not in_slurm:
        return None
    from launcher.slurm.environment import read_allocation  # 7 ms that a command with a hostfile does not pay

    return read_allocation(os.environ, gpus_by_node=_gpus_by_node(), num_slots=num_ranks)


def _gpus_by_node() -> dict[str, int]:
    """Ask Slurm for the GPUs of every node: the environment knows this node's at best, and salloc's none at all."""
    from launcher.slurm.environment import parse_job_detail
    from launcher.slurm.queue import job_detail

    try:
        return parse_job_detail(job_detail(os.environ[env.SLURM_JOB_ID.name]))
    except (TransportError, HostfileError):
        return {}  # the environment has to do; read_allocation refuses what it cannot know
