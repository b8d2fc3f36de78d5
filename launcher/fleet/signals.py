"""Signals to the launcher, as a queue that the main thread reads."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from launcher.base.signals import NOTICE_SIGNAL, take_held, term_is_notice

STACKS_SIGNAL = signal.SIGQUIT  # Ctrl-\\: show the stacks of all ranks, and continue
# `launch stacks --native`. Ignored by default: a launcher of an older version is not ended by it.
NATIVE_STACKS_SIGNAL = signal.SIGURG
SUSPEND_SIGNAL = signal.SIGTSTP  # Ctrl-Z
# Signals within this time are one: GNU timeout sends its signal to a process and then to its group, systemd SIGTERM and
# SIGHUP. Who presses Ctrl-C twice may be quicker.
_SAME_S = 1.0
_SAME_INTERRUPT_S = 0.1


class SignalQueue:
    """Remembers signals from their handlers; the main thread takes them out. One serves all runs of a job."""

    def __init__(
        self,
        stop_signals: Sequence[int],
        others: Sequence[int] = (STACKS_SIGNAL, NATIVE_STACKS_SIGNAL, NOTICE_SIGNAL, SUSPEND_SIGNAL),
    ) -> None:
        """stop_signals: ask for the end. others: are remembered as well."""
        self.wake: Callable[[], None] = lambda: None  # ends the main thread's waiting; runs in signal handlers
        self.wants_suspension = False  # Ctrl-Z; whoever sees it calls `suspend`
        self._stop_signals = stop_signals
        self._others = others
        self._arrived: list[int] = []
        self._num_taken = 0
        self._kept: list[int] = []  # signals that a wait found and that are not about leaving it
        self._counted_s = -math.inf  # monotonic, of the last stop signal that counted
        self._noticed_s = -math.inf  # the same of notices
        self._term_is_notice = NOTICE_SIGNAL in others and term_is_notice()

    @property
    def first_stop(self) -> int | None:
        """The first signal that asked for the end, None when none did."""
        return next((number for number in self._arrived if number in self._stop_signals), None)

    @property
    def was_noticed(self) -> bool:
        """Whether a notice has come: the job will lose its nodes."""
        return NOTICE_SIGNAL in self._arrived and NOTICE_SIGNAL not in self._stop_signals

    def ask(self, number: int) -> None:
        """Have the same done as if this signal had come. Any thread."""
        self._arrived.append(number)
        self.wake()

    def take(self) -> Sequence[int]:
        """Return the signals that came since the last call, but for stop signals that have ended a wait."""
        new = self._arrived[self._num_taken :]
        self._num_taken += len(new)
        kept, self._kept = self._kept, []
        return [*kept, *new]

    def take_cancel(self) -> bool:
        """Whether a stop signal came since signals were last taken; for waits that only wait. Obeys Ctrl-Z.

        What else has come is kept for `take`: a notice may be the only one, however long the wait is.
        """
        if self.wants_suspension:
            self.suspend()
        new = self.take()
        self._kept += [number for number in new if number not in self._stop_signals]
        return any(number in self._stop_signals for number in new)

    def suspend(self) -> float:
        """Stop this process, as Ctrl-Z would have, until SIGCONT. Returns how long that was, in seconds."""
        self.wants_suspension = False
        start_s = wall_s()
        ours = signal.signal(SUSPEND_SIGNAL, signal.SIG_DFL)
        os.kill(os.getpid(), SUSPEND_SIGNAL)
        signal.signal(SUSPEND_SIGNAL, ours)
        return wall_s() - start_s

    def _count(self, number: int) -> None:
        """Record a signal that has come, unless it is the one before once more. In signal handlers."""
        now_s = time.monotonic()
        if number == signal.SIGTERM and self._term_is_notice:  # the first one; what follows at once is the same
            self._term_is_notice, self._counted_s, number = False, now_s, int(NOTICE_SIGNAL)
        if number == NOTICE_SIGNAL:
            before_s, self._noticed_s = self._noticed_s, now_s
            is_new = now_s - before_s > _SAME_S
        elif number in self._stop_signals:
            is_new = now_s - self._counted_s > (_SAME_INTERRUPT_S if number == signal.SIGINT else _SAME_S)
            self._counted_s = now_s if is_new else self._counted_s
        else:
            is_new = True
        if is_new:
            self._arrived.append(number)

    @contextlib.contextmanager
    def listening(self, *, is_last: bool = False) -> Iterator[None]:
        """Handle signals here as long as the context lasts. Main thread only.

        is_last: what comes later is ignored: the process is about to exit, and with which code is decided.
        """

        def remember(number: int, _frame: FrameType | None) -> None:
            if number == SUSPEND_SIGNAL:
                self.wants_suspension = True
            else:
                self._count(number)
            self.wake()

        handled: set[int] = {*self._stop_signals, *self._others}
        if self._term_is_notice:
            handled.add(signal.SIGTERM)
        for number in (signal.SIGHUP, SUSPEND_SIGNAL):
            if signal.getsignal(number) is signal.SIG_IGN:
                handled.discard(number)  # `nohup launch`: the job is to outlive its terminal
        previous = {given: signal.signal(given, remember) for given in handled}
        if NOTICE_SIGNAL in handled:
            self._arrived += take_held()
        try:
            yield
        finally:
            for given, handler in previous.items():
                is_ignored = is_last and (given in self._stop_signals or given == NOTICE_SIGNAL)
                signal.signal(given, signal.SIG_IGN if is_ignored else handler)


def wall_s() -> float:
    """Return a clock in seconds that is never set and that continues while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
