"""What the kernel knows about processes: descendants, parent-death signals, job membership. Linux only.

Nothing here looks at names. A process belongs to a job because it descends from the job's agent, which adopts
orphans (child subreaper), or because it carries the job's id in its environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

from launcher.base import env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
SWEEP_INTERVAL_S = 0.05
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent ends; exits at once if it already has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before the request was made
        os._exit(128 + signal.SIGKILL)


def _parents() -> dict[int, int]:
    """Return pid -> parent pid of every process, zombies left out."""
    parents = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
            # The name in parentheses may itself hold spaces and parentheses.
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                parents[int(name)] = int(parent)
    return parents


def descendants(root_pid: int) -> set[int]:
    """Return every living descendant of `root_pid`, whatever session or group it is in."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    waiting = [root_pid]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            if pid not in found:
                found.add(pid)
                waiting.append(pid)
    return found


def members_of_job(job_id: str) -> set[int]:
    """Return every living process, this one left out, whose environment carries exactly this job id."""
    wanted = f"{env.JOB_ID.name}={job_id}".encode()
    found = set()
    for pid in _parents():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if wanted in file.read().split(b"\0"):
                found.add(pid)
    return found


def send(pids: Iterable[int], signal_number: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal_number)


def sweep_job(job_id: str, timeout_s: float = 5.0) -> set[int]:
    """Kill the processes of a job until none is left or `timeout_s` has passed. Returns those that are left."""
    deadline = time.monotonic() + timeout_s
    while (members := members_of_job(job_id)) and time.monotonic() < deadline:
        send(members, signal.SIGKILL)
        time.sleep(SWEEP_INTERVAL_S)
    return members
