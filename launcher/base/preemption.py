"""The notice that a job will soon be taken off its nodes: SIGUSR1, from the scheduler through `launch` to every rank.

A rank that is told finishes its step, saves, and exits with EXIT_REQUEUE; `launch` ends with that code too, once every
rank has ended, and the batch script of `launch sbatch --requeue` puts the job back into the queue. Standard library
only: the worker imports this before the script runs.
"""

from __future__ import annotations

import signal
import threading

from launcher.base.errors import ExitCode

NOTICE_SIGNAL = signal.SIGUSR1
EXIT_REQUEUE = int(ExitCode.REQUEUE)

_was_told = threading.Event()


def preempted() -> bool:
    """Tell whether this rank was told that its job will soon be taken off its nodes.

    Each rank learns it for itself and a step earlier or later than others: agree, for instance by an all-reduce of the
    maximum, before the ranks act on it together.
    """
    listen()
    return _was_told.is_set()


def listen() -> None:
    """Take the notice from now on. A script's own handler is left alone; does nothing outside the main thread."""
    is_free = signal.getsignal(NOTICE_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN)
    if is_free and threading.current_thread() is threading.main_thread():
        signal.signal(NOTICE_SIGNAL, lambda _number, _frame: _was_told.set())
        signal.siginterrupt(NOTICE_SIGNAL, False)  # libraries that do not expect EINTR must not fail of it
