"""What a signal to the launcher counts as, and that none is thrown away by a wait that it is not about."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import pytest

from launcher.base import env
from launcher.base.signals import NOTICE_SIGNAL
from launcher.fleet import signals
from launcher.fleet.signals import SignalQueue

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(signals.time, "monotonic", clock.monotonic)
    return clock


def taken_of(queue: SignalQueue, clock: Clock, *sent: tuple[float, int]) -> Sequence[int]:
    """Send signals to this process, each at a time after the start, and return those that count."""
    start_s = clock.now_s
    with queue.listening():
        for at_s, number in sent:
            clock.now_s = start_s + at_s
            os.kill(os.getpid(), number)
    return queue.take()


@pytest.mark.parametrize(
    ("sent", "counted"),
    [
        ([(0.0, signal.SIGTERM), (0.001, signal.SIGTERM)], [signal.SIGTERM]),
        ([(0.0, signal.SIGTERM), (0.9, signal.SIGTERM), (1.1, signal.SIGTERM)], [signal.SIGTERM] * 2),
        ([(0.0, signal.SIGTERM), (0.01, signal.SIGHUP)], [signal.SIGTERM]),
        ([(0.0, signal.SIGINT), (0.05, signal.SIGINT)], [signal.SIGINT]),
        ([(0.0, signal.SIGINT), (0.15, signal.SIGINT)], [signal.SIGINT] * 2),
        ([(0.0, signal.SIGTERM), (0.3, signal.SIGINT)], [signal.SIGTERM, signal.SIGINT]),
        ([(0.0, NOTICE_SIGNAL), (0.01, NOTICE_SIGNAL), (0.02, signal.SIGTERM)], [NOTICE_SIGNAL, signal.SIGTERM]),
    ],
)
def test_signals_at_once_are_one_and_a_user_may_insist(
    clock: Clock, sent: list[tuple[float, int]], counted: list[int]
) -> None:
    assert taken_of(SignalQueue(STOPS), clock, *sent) == counted


def test_in_a_batch_script_that_requeues_the_first_sigterm_is_a_notice(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.TERM_IS_NOTICE.name, "1")
    sent = [(at_s, signal.SIGTERM) for at_s in (0.0, 0.01, 5.0, 5.01)]
    queue = SignalQueue((signal.SIGINT,))  # SIGTERM is listened to all the same
    assert taken_of(SignalQueue(STOPS), clock, *sent) == [NOTICE_SIGNAL, signal.SIGTERM]
    assert taken_of(queue, clock, sent[0]) == [NOTICE_SIGNAL]
    assert queue.first_stop is None
    assert queue.was_noticed


def test_a_wait_that_asks_for_stop_signals_keeps_all_others() -> None:
    queue = SignalQueue(STOPS)
    queue.ask(NOTICE_SIGNAL)
    assert not queue.take_cancel()
    queue.ask(signal.SIGQUIT)
    queue.ask(signal.SIGINT)
    assert queue.take_cancel()
    assert not queue.take_cancel(), "each stop signal ends one wait"
    assert queue.take() == [NOTICE_SIGNAL, signal.SIGQUIT]
    assert queue.take() == []
    assert queue.first_stop == signal.SIGINT


def test_signals_of_a_real_clock_are_told_apart() -> None:
    queue = SignalQueue(STOPS)
    with queue.listening():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.12)  # the gap is what is tested
        os.kill(os.getpid(), signal.SIGINT)
    assert queue.take() == [signal.SIGINT] * 2
