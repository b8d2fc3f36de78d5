"""The notice that a job will soon be taken off its nodes: SIGUSR1, from the scheduler through `launch` to every rank.

A rank that is told finishes its step, saves, and exits with EXIT_REQUEUE; `launch` ends with that code too, once every
rank has ended, and the batch script of `launch sbatch --requeue` puts the job back into the queue. Standard library
only: the worker imports this before the script runs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal

from launcher.base import env
from launcher.base.exit_codes import ExitCode
from launcher.base.signals import NOTICE_SIGNAL, term_is_notice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

EXIT_REQUEUE = int(ExitCode.REQUEUE)


def stop_file(scratch: str) -> str:
    """Return the file that an agent makes in its folder before it sends SIGTERM, where that may be a notice, too."""
    return os.path.join(scratch, "stopping")


class _Notice:
    """The handler of the notice, which remembers that it came.

    The worker installs it, and leaves `sys.modules` to the script, which gets a copy of this module of its own: the one
    thing that both share is the handler that is in force.
    """

    is_launch_notice = True
    has_come = False

    def __init__(self) -> None:
        error_file = os.environ.get(env.ERROR_FILE.name)
        self._stop_file = stop_file(os.path.dirname(error_file)) if error_file is not None else None

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        # Slurm sends SIGTERM to every process of the job; the agent, when it ends the ranks, says so first.
        if number == signal.SIGTERM and self._stop_file is not None and os.path.exists(self._stop_file):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.has_come = True

    def listen_to_term(self) -> None:
        """Take SIGTERM for the notice too, but not in forks of the rank: there it ends them, as others expect.

        It is blocked as long as a fork has our handler: one that came then would be lost.
        """
        signal.signal(signal.SIGTERM, self)
        signal.siginterrupt(signal.SIGTERM, False)
        masks: list[set[int]] = []

        def restore() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

        def leave_child() -> None:
            if signal.getsignal(signal.SIGTERM) is self:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            restore()

        os.register_at_fork(
            before=lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])),
            after_in_parent=restore,
            after_in_child=leave_child,
        )


def _in_force() -> _Notice | None:
    handler: Any = signal.getsignal(NOTICE_SIGNAL)
    return handler if getattr(handler, "is_launch_notice", False) else None


_notice = _in_force()  # or the one that was, until the script took the signal over


def preempted() -> bool:
    """Return whether this rank was told that its job will soon be taken off its nodes.

    Each rank learns it for itself and a step earlier or later than others: agree, for instance by an all-reduce of the
    maximum, before the ranks act on it together.
    """
    listen()
    return _notice is not None and _notice.has_come


def listen() -> None:
    """Take the notice from now on. A script's own handler is left alone; does nothing outside the main thread.

    Agents start ranks with the notice blocked: one that came before now waits, and is taken now.
    """
    global _notice
    _notice = _in_force() or _notice
    if signal.getsignal(NOTICE_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN):
        with contextlib.suppress(ValueError):  # not the main thread
            notice = _Notice()
            signal.signal(NOTICE_SIGNAL, notice)
            _notice = notice
            atexit.register(_ignore_late)
            signal.siginterrupt(NOTICE_SIGNAL, False)  # libraries that do not expect EINTR must not fail of it
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [NOTICE_SIGNAL])
            if term_is_notice() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                notice.listen_to_term()


def _ignore_late() -> None:
    """Ignore a notice that comes while the interpreter ends.

    Python takes its handlers away before it destroys modules, a script's own too, and leaves the signal's default,
    which ends the process: a rank that has done all its work would be reported as killed. An ignored one stays ignored.
    """
    if callable(signal.getsignal(NOTICE_SIGNAL)):
        signal.signal(NOTICE_SIGNAL, signal.SIG_IGN)


def leave_to_program(*, is_asked_for: bool) -> None:
    """Drop a notice that waits, and let the program that this process becomes handle the next one if it can.

    is_asked_for: who sends it looks first whether the program handles it, as agents do. Else it stays ignored: a
    program that does not know it would die of it. A shell can handle no signal that was ignored when it began.
    """
    signal.signal(NOTICE_SIGNAL, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [NOTICE_SIGNAL])
    if is_asked_for:
        signal.signal(NOTICE_SIGNAL, signal.SIG_DFL)
