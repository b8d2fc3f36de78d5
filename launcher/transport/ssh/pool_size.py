"""How the connections of many hosts are shared out: over how many processes, with how many open files.

Apart from `pool`, which does it, so that asking costs a job without SSH no import of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from launcher.base import env
from launcher.base.errors import UsageError
from launcher.base.file_limit import allow_files

MAX_PROCESSES = 8
HOSTS_A_PROCESS = 64  # fewer do not pay for the start of one
CORES_A_PROCESS = 2  # this process works too
FILES_A_HOST = 5  # the pipes of a local agent and what wakes their reader; a connection takes fewer
_OWN_FILES = 256  # everything but connections, with room for whatever runs at the same time


def num_processes(num_hosts: int, num_cores: int, environ: Mapping[str, str]) -> int:
    """Return over how many helpers the connections are spread; 0: this process holds them itself.

    Raises: UsageError for a bad LAUNCH_SSH_PROCESSES.
    """
    given = environ.get(env.SSH_PROCESSES.name, "")
    if given:
        if not (given.isascii() and given.isdigit() and len(given) <= 4):
            raise UsageError(f'{env.SSH_PROCESSES.name} is "{given}"', hint="give a number of processes, 0 for none")
        return min(int(given), num_hosts)
    number = min(MAX_PROCESSES, num_cores // CORES_A_PROCESS, num_hosts // HOSTS_A_PROCESS)
    return number if number > 1 else 0


def helper_count(num_hosts: int) -> int:
    """Return `num_processes` on this machine."""
    return num_processes(num_hosts, len(os.sched_getaffinity(0)), os.environ)


def allow_connections(num_hosts: int, *, has_helpers: bool) -> None:
    """Raise the limit of open files for agents on that many hosts, this machine among them or not.

    Raises: UsageError when the hard limit is too low and no helper processes share the connections.
    """
    num_needed = _OWN_FILES + FILES_A_HOST * num_hosts
    limit = allow_files(num_needed)
    if limit < FILES_A_HOST * num_hosts and not has_helpers:
        raise UsageError(
            f"{num_hosts} hosts need {num_needed} open files, and the hard limit here is {limit}",
            hint=f"have it raised (see ulimit -Hn), or set {env.SSH_PROCESSES.name}: each process has its own limit",
        )
