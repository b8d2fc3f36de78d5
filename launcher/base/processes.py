"""What the kernel knows about processes: descendants, parent-death signals, job membership. Linux only.

Nothing here looks at names. A process belongs to a job because it descends from the job's agent, which adopts
orphans (child subreaper), or because it carries the job's id in its environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time

from launcher.base import env
from launcher.base.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
SWEEP_INTERVAL_S = 0.05
_SWEEP_S = 5.0
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


def allow_tracing(pid: int) -> None:
    """Let a process of this user and its descendants trace this one, also after an exec.

    Where the kernel is strict (Yama's ptrace_scope 1, as Ubuntu has it), else only ancestors may: py-spy is none.
    """
    with contextlib.suppress(OSError):  # EINVAL: a kernel without Yama
        _prctl(_PR_SET_PTRACER, pid)


def _stat_of(pid: int) -> tuple[int, str, str] | None:
    """Return parent, state and start time (in ticks since the boot) of a process, None when there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        # The name in parentheses may itself hold spaces and parentheses.
        fields = file.read().rpartition(b")")[2].split()
        return int(fields[1]), fields[0].decode(), fields[19].decode()
    return None


def identity(pid: int) -> str:
    """Return what no other process of this boot has: pid and start time; "" when it has ended."""
    found = _stat_of(pid)
    return f"{pid}:{found[2]}" if found is not None and found[1] not in "ZX" else ""


def state_of(pid: int) -> str:
    """Return the state of a process as /proc shows it ("T" is stopped, "D" waits for a device), "" without one."""
    found = _stat_of(pid)
    return "" if found is None else found[1]


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal: SigCgt of proc(5)."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) & 1 << (number - 1))
    return False


def _all() -> Iterator[tuple[int, int, str]]:
    """Yield pid, parent and identity of every process, zombies left out."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            found = _stat_of(int(name))
            if found is not None and found[1] not in "ZX":
                yield int(name), found[0], f"{name}:{found[2]}"


def _tree(root_pid: int) -> list[str]:
    """Return the identities of every living descendant of `root_pid`, whatever session or group it is in."""
    children: dict[int, list[tuple[int, str]]] = {}
    for pid, parent, who in _all():
        children.setdefault(parent, []).append((pid, who))
    found: list[str] = []
    waiting = [root_pid]
    while waiting:
        below = children.pop(waiting.pop(), [])
        found += [who for _, who in below]
        waiting += [pid for pid, _ in below]
    return found


def _pids(identities: Iterable[str]) -> set[int]:
    return {int(who.partition(":")[0]) for who in identities}


def descendants(root_pid: int) -> set[int]:
    """Return every living descendant of `root_pid`, whatever session or group it is in."""
    return _pids(_tree(root_pid))


def signal_descendants(root_pid: int, number: int) -> set[int]:
    """Send a signal to every living descendant of `root_pid`; returns them."""
    found = _tree(root_pid)
    send(found, number)
    return _pids(found)


def name_of(pid: int) -> str:
    """Return the name of a process, "?" when it has gone or the name is not to be shown."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            name = file.read().strip()
    except OSError:
        return "?"
    return name if name.isprintable() else "?"


def members_of_job(job_id: str) -> set[int]:
    """Return every living process, this one left out, whose environment carries exactly this job id."""
    return _pids(_members(job_id))


def _members(job_id: str) -> list[str]:
    wanted = f"{env.JOB_ID.name}={job_id}".encode()
    found = []
    for pid, _, who in _all():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if pid != os.getpid() and wanted in file.read().split(b"\0"):
                found.append(who)
    return found


def send(identities: Iterable[str], number: int) -> None:
    """Send a signal to each process that still exists, and to no other that has got its pid since."""
    for who in identities:
        pid = int(who.partition(":")[0])
        with contextlib.suppress(ProcessLookupError, PermissionError):
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            except OSError:  # a kernel before 5.3, or no descriptor is left: there is a moment between look and signal
                if identity(pid) == who:
                    os.kill(pid, number)
                continue
            try:
                if identity(pid) == who:  # the descriptor is this one's for good, whichever gets the pid later
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)


def sweep_job(job_id: str, agents: Sequence[tuple[str, str]] = ()) -> set[int]:
    """Kill the processes of a job until none is left or 5 s have passed. Returns those that are left.

    agents: identities of agents, which do not carry the id, each with its guard's, which ends what it leaves.
    """
    deadline = time.monotonic() + _SWEEP_S
    while True:
        members = [*_members(job_id), *(agent for agent, _ in agents if _is_alive(agent))]
        guards = [guard for _, guard in agents if _is_alive(guard)]
        if not (members or guards) or time.monotonic() >= deadline:
            return _pids([*members, *guards])
        send(members, signal.SIGKILL)
        time.sleep(SWEEP_INTERVAL_S)


def _is_alive(who: str) -> bool:
    return identity(int(who.partition(":")[0])) == who


def end_orphans(timeout_s: float) -> None:
    """Kill all descendants of this process, which has adopted them, until none is left or `timeout_s` has passed."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:  # who has adopted all orphans and has no child has no descendant
            return
        signal_descendants(os.getpid(), signal.SIGKILL)
        time.sleep(SWEEP_INTERVAL_S)


# ---- The limit of open files ----


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
