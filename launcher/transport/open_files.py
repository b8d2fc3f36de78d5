"""How many open files the agents of a job need on this machine."""

from __future__ import annotations

from launcher.base.errors import UsageError
from launcher.base.file_limit import allow_files

FILES_A_HOST = 6  # the pipes of a local agent or of `ssh`, and what wakes their reader; paramiko takes one
_OWN_FILES = 256  # everything but connections, with room for whatever runs at the same time


def allow_connections(num_hosts: int) -> None:
    """Raise the limit of open files for agents on that many hosts, this machine among them or not.

    Raises: UsageError when the hard limit is too low.
    """
    num_needed = _OWN_FILES + FILES_A_HOST * num_hosts
    limit = allow_files(num_needed)
    if limit < FILES_A_HOST * num_hosts:
        raise UsageError(
            f"{num_hosts} hosts need {num_needed} open files, and the hard limit here is {limit}",
            hint="have it raised (see ulimit -Hn)",
        )
