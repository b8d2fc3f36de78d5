"""Signals to the launcher, as a queue that the main thread reads."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from launcher.base.signals import NOTICE_SIGNAL, take_held

STACKS_SIGNAL = signal.SIGQUIT  # Ctrl-\\: show the stacks of all ranks, and continue
SUSPEND_SIGNAL = signal.SIGTSTP  # Ctrl-Z


class SignalQueue:
    """Remembers signals from their handlers; the main thread takes them out. One serves all runs of a job."""

    def __init__(
        self, stop_signals: Sequence[int], others: Sequence[int] = (STACKS_SIGNAL, NOTICE_SIGNAL, SUSPEND_SIGNAL)
    ) -> None:
        """stop_signals: ask for the end. others: are remembered as well."""
        self.wake: Callable[[], None] = lambda: None  # ends the main thread's waiting; runs in signal handlers
        self.wants_suspension = False  # Ctrl-Z; whoever sees it calls `suspend`
        self._stop_signals = stop_signals
        self._others = others
        self._arrived: list[int] = []
        self._num_taken = 0

    @property
    def first_stop(self) -> int | None:
        """The first signal that asked for the end, None when none did."""
        return next((number for number in self._arrived if number in self._stop_signals), None)

    def ask(self, number: int) -> None:
        """Have the same done as if this signal had come. Any thread."""
        self._arrived.append(number)
        self.wake()

    def take(self) -> Sequence[int]:
        """Return the signals that came since the last call."""
        new = self._arrived[self._num_taken :]
        self._num_taken += len(new)
        return new

    def asks_to_leave(self) -> bool:
        """Whether a stop signal came since signals were last taken; for waits that only wait. Obeys Ctrl-Z."""
        if self.wants_suspension:
            self.suspend()
        return any(number in self._stop_signals for number in self.take())

    def suspend(self) -> float:
        """Stop this process, as Ctrl-Z would have, until SIGCONT. Returns how long that was, in seconds."""
        self.wants_suspension = False
        start_s = wall_s()
        ours = signal.signal(SUSPEND_SIGNAL, signal.SIG_DFL)
        os.kill(os.getpid(), SUSPEND_SIGNAL)
        signal.signal(SUSPEND_SIGNAL, ours)
        return wall_s() - start_s

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals here as long as the context lasts. Main thread only."""

        def remember(number: int, _frame: FrameType | None) -> None:
            if number == SUSPEND_SIGNAL:
                self.wants_suspension = True
            else:
                self._arrived.append(number)
            self.wake()

        handled: set[int] = {*self._stop_signals, *self._others}
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
                signal.signal(given, handler)


def wall_s() -> float:
    """Return a clock in seconds that is never set and that continues while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
