"""The limit of open files of this process: raised for what is needed, and remembered for the programs it starts."""

from __future__ import annotations

import contextlib
import os
import resource
import sys

from launcher.base.errors import UsageError

FILES_A_HOST = 6  # the pipes of a local agent or of `ssh`, and what wakes their reader; paramiko takes one
_OWN_FILES = 256  # everything but connections, with room for whatever runs at the same time
_original_soft: int | None = None  # before the first raise


def allow_files(num_needed: int) -> int:
    """Raise the soft limit of open files to `num_needed`, or as far as the hard one allows.

    Returns how many files may be open now. Everything that is started later inherits the limit, see `original_limit`.
    """
    global _original_soft
    soft, hard = (_number(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    if soft >= num_needed:
        return soft
    wanted = min(num_needed, hard)
    with contextlib.suppress(OSError, ValueError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        _original_soft = soft if _original_soft is None else _original_soft
        return wanted
    return soft


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


def original_limit() -> int:
    """Return the soft limit this process was started with, which its user has chosen."""
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) if _original_soft is None else _original_soft


def give_limit(soft: int) -> None:
    """Set the soft limit of this process, as far as its hard limit allows. For a child, before it runs a program."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, _number(hard)) if soft < sys.maxsize else hard, hard))


def num_open() -> int:
    """Return how many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


def _number(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
