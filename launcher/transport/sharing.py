"""How the connections of many hosts are shared out: over how many processes, with how many open files.

Apart from `transport.ssh_pool`, which does it, so that asking costs a job without SSH no import of it.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Mapping

from launcher.base import env
from launcher.base.errors import UsageError

MAX_PROCESSES = 8
HOSTS_A_PROCESS = 64  # fewer do not pay for the start of one
CORES_A_PROCESS = 2  # this process works too
FILES_A_HOST = 4


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


def allow_files(num_hosts: int) -> None:
    """Raise the soft limit of open files, as far as the hard one allows, where that many hosts need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 256 + FILES_A_HOST * num_hosts
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
