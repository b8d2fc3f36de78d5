"""The notice that a job will soon be taken off its nodes: SIGUSR1, from the scheduler through `launch` to every rank.

A rank that is told finishes its step, saves, and exits with EXIT_REQUEUE; `launch` ends with that code too, once every
rank has ended, and the batch script of `launch sbatch --requeue` puts the job back into the queue. Standard library
only: the worker imports this before the script runs.
"""

from __future__ import annotations

import contextlib
import signal

from launcher.base.exit_codes import ExitCode
from launcher.base.signals import NOTICE_SIGNAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

EXIT_REQUEUE = int(ExitCode.REQUEUE)

_was_told = False


def preempted() -> bool:
    """Tell whether this rank was told that its job will soon be taken off its nodes.

    Each rank learns it for itself and a step earlier or later than others: agree, for instance by an all-reduce of the
    maximum, before the ranks act on it together.
    """
    listen()
    return _was_told


def listen() -> None:
    """Take the notice from now on. A script's own handler is left alone; does nothing outside the main thread.

    Agents start ranks with the notice blocked: one that came before now waits, and is taken now.
    """
    if signal.getsignal(NOTICE_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
        return
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(NOTICE_SIGNAL, _remember)
        signal.siginterrupt(NOTICE_SIGNAL, False)  # libraries that do not expect EINTR must not fail of it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [NOTICE_SIGNAL])


def ignore() -> None:
    """Ignore the notice, one that waits included: for a program that does not know it and would die of it."""
    signal.signal(NOTICE_SIGNAL, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [NOTICE_SIGNAL])


def _remember(_number: int, _frame: FrameType | None) -> None:
    global _was_told
    _was_told = True
