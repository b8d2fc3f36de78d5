"""The agent: the one process per node that owns the node's ranks, and the guard, its parent.

The agent speaks the protocol of `wire` on stdin and stdout. Its life is a lease: when stdin ends, or no message came
for the length of the lease, it ends its ranks and leaves. The guard does nothing until the agent ends. When that was
killed, its orphans become the guard's, whatever their environment says: it ends them, and removes the agent's folder.
The agent does the same when the guard was killed. Both hold stdout: the launcher sees its end when both are done.
"""

from __future__ import annotations

import os
import select
import signal
import sys

from launcher.agent import scratch
from launcher.agent.supervisor import Supervisor
from launcher.base.processes import adopt_orphans, end_orphans
from launcher.base.signals import NOTICE_SIGNAL, hear_of_children
from launcher.base.timeouts import timeouts

_LOOK_INTERVAL_S = 0.5  # of the guard, while its agent is stopped
# Schedulers and service managers signal every process; only the agent acts on it.
_BLOCKED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, NOTICE_SIGNAL)


def main() -> int:
    """Fork the agent and guard it, until nothing of it is left. Returns the exit status, in both processes."""
    hear_of_children()
    launcher_pid = os.getppid()
    lifeline, held = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    adopt_orphans()
    has_jobs = _has_children()
    agent_pid = os.fork()
    if agent_pid == 0:
        os.close(held)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return serve(lifeline)
    os.close(lifeline)
    status = _guard(agent_pid, launcher_pid)
    if has_jobs:  # they hold stdout, so the launcher would wait for them
        end_orphans(timeouts().kill_s)
    return clean_up_after(agent_pid, status)


def _has_children() -> bool:
    """Whether --setup has left processes in the background: its shell has become this process."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def serve(lifeline: int | None = None, *, is_in_step: bool = False) -> int:
    """Serve until all ranks are gone. Returns the exit status.

    lifeline: ends when the guard does. is_in_step: a task of srun, whose ranks Slurm signals, too.
    """
    # Protocol bytes only on the real stdout: a stray print of ours would damage the stream.
    output = os.dup(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # Ranks inherit this until their worker listens: an early notice, Slurm's to the whole step too, waits for that.
    signal.pthread_sigmask(signal.SIG_BLOCK, [NOTICE_SIGNAL])
    adopt_orphans()
    try:
        supervisor = Supervisor(sys.stdin.fileno(), output, lifeline, is_in_step=is_in_step)
    except OSError as error:  # too few descriptors: the launcher shows these words
        sys.stderr.write(f"the agent cannot work on this host: {error.strerror or error}\n")
        return 1
    supervisor.run()
    return 0


def clean_up_after(agent_pid: int, status: int) -> int:
    """End what an agent has left that did not end well. status: its exit code or minus the signal.

    Returns the status as a shell shows it. For the process that has adopted the agent's orphans.
    """
    if status != 0:
        end_orphans(timeouts().kill_s)
        scratch.remove_of(agent_pid)
    return status if status >= 0 else 128 - status


def _guard(agent_pid: int, launcher_pid: int) -> int:
    """Wait for the end of the agent; returns its status. SIGTERM of the launcher alone means: kill it now.

    An agent that was stopped (SIGSTOP) does not notice that its launcher has ended: its guard does.
    """
    poller = select.poll()
    poller.register(0, select.POLLHUP)
    is_stopped = False
    while True:
        # One look in a day does no harm, and there is no call without a limit that returns all that is needed.
        found = signal.sigtimedwait(_BLOCKED, _LOOK_INTERVAL_S if is_stopped else 86_400.0)
        is_asked = found is not None and found.si_signo == signal.SIGTERM and found.si_pid == launcher_pid
        if is_asked or (is_stopped and poller.poll(0)):
            os.kill(agent_pid, signal.SIGKILL)  # it is not reaped yet, so no other process can be hit
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                break
            if pid != agent_pid:
                continue
            if not (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
                return os.waitstatus_to_exitcode(status)
            is_stopped = os.WIFSTOPPED(status)
