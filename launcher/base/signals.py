"""Signals that agents send to ranks and that do not end them, and what signals mean while the command line loads."""

from __future__ import annotations

import atexit
import os
import signal

from launcher.base import env
from launcher.base.exit_codes import ExitCode

# The job will soon be taken off its nodes, see `preemption`.
NOTICE_SIGNAL = signal.SIGUSR1
# Asks a rank for its stacks. The default action of this signal is to be ignored, so a rank that is not a Python script,
# or not yet one, is not hurt.
STACKS_SIGNAL = signal.SIGURG

_held: list[int] = []  # notices that came before anybody listened
child_groups: set[tuple[int, int]] = set()  # (pid of the parent, process group) to kill when the parent exits


def hold_notices() -> None:
    """Remember notices from now on instead of dying of them; `take_held` gives them out. Main thread only.

    A handler, because a signal that is blocked or ignored would be so in every program that is started, too. One that
    our parent has blocked may wait already: no process can handle signals before its interpreter has started.
    """
    signal.signal(NOTICE_SIGNAL, lambda number, _frame: _held.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [NOTICE_SIGNAL])


def hear_of_children() -> None:
    """Give SIGCHLD its default action, first of all. Main thread only.

    A parent that ignores it passes that on over exec, and the kernel keeps the ends of children from us then: we would
    wait for them for ever.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def term_is_notice() -> bool:
    """Whether the first SIGTERM is a notice: Slurm, as it comes, gives no other before it takes the nodes away."""
    return os.environ.get(env.TERM_IS_NOTICE.name) == "1"


def leave_at_interrupt() -> None:
    """End this process at once when Ctrl-C comes, as long as there is nothing to put in order. Main thread only.

    Python's own way, an exception, is lost or shown as a traceback where it meets an import or a finalizer.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, _leave)


def raise_at_interrupt() -> None:
    """Turn Ctrl-C into KeyboardInterrupt again, for code that puts things in order."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@atexit.register
def kill_child_groups() -> None:
    """Kill the process groups in `child_groups` that this process has started; daemon threads do not at its exit."""
    for pid, group in tuple(child_groups):
        if pid != os.getpid():  # inherited by a fork
            continue
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:  # it has ended just now
            continue


def _leave(_number: int, _frame: object) -> None:
    kill_child_groups()
    os._exit(ExitCode.INTERRUPTED)


def take_held() -> list[int]:
    """Return the notices that were held, each once."""
    held = _held.copy()
    _held.clear()
    return held
