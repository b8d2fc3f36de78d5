"""Is this process inside a Slurm allocation? Asked at every start, so that it costs no more than this."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.base import env


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Return whether this process runs inside a Slurm allocation whose hosts are its to use.

    A rank that starts `launch` itself is not meant: its hosts already run the job it belongs to. A shell of salloc in a
    heterogeneous job knows no node list of the whole job, and is inside all the same.
    """
    if env.JOB_ID.name in environ:
        return False
    has_nodes = env.SLURM_JOB_ID.name in environ and env.SLURM_JOB_NODELIST.name in environ
    return has_nodes or env.SLURM_HET_SIZE.name in environ
