"""The exit codes of `launch` itself, and of processes as a shell shows them."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `launch` itself; a failed rank's own code passes through unchanged."""

    OK = 0
    FAILURE = 1  # a rank failed without a code of its own, or an internal error
    USAGE = 2  # wrong options, hostfile or config: nothing was started
    HANG = 124  # a rank made no progress for --hang-timeout ; of `launch exec`: --timeout (the code of `timeout`)
    REQUEUE = 75  # the ranks saved and ended because the job is to be started again (EX_TEMPFAIL)
    UNREACHABLE = 69  # a host could not be reached or its agent could not start (EX_UNAVAILABLE)
    INTERRUPTED = 130  # Ctrl-C


def shell_code(status: int) -> int:
    """Turn an exit code or minus a signal number into what a shell shows."""
    return status if status >= 0 else 128 - status
