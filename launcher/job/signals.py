"""Signals to the launcher, as a queue the controller reads."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from launcher.base.signals import NOTICE_SIGNAL, take_held

STACKS_SIGNAL = signal.SIGQUIT  # Ctrl-\\: show where every rank stands, and go on


class SignalQueue:
    """Remembers signals from their handlers; the main thread takes them out."""

    def __init__(self, wake: Callable[[], None], stop_signals: Sequence[int]) -> None:
        """wake: ends the main thread's waiting; must be safe in a signal handler."""
        self._wake = wake
        self._stop_signals = stop_signals
        self._arrived: list[int] = []
        self._num_taken = 0

    @property
    def first_stop(self) -> int | None:
        """The first signal that asked for the end, None when none did."""
        return next((number for number in self._arrived if number in self._stop_signals), None)

    def take(self) -> Sequence[int]:
        """Return the signals that came since the last call."""
        new = self._arrived[self._num_taken :]
        self._num_taken += len(new)
        return new

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals here as long as the context lasts. Main thread only."""

        def remember(number: int, _frame: FrameType | None) -> None:
            self._arrived.append(number)
            self._wake()

        handled = {*self._stop_signals, STACKS_SIGNAL, NOTICE_SIGNAL}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            handled.discard(signal.SIGHUP)  # `nohup launch`: the job is to outlive its terminal
        previous = {number: signal.signal(number, remember) for number in handled}
        self._arrived += take_held()
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
