"""The two signals that agents send to ranks and that do not end them."""

from __future__ import annotations

import signal

# The job will soon be taken off its nodes, see `preemption`.
NOTICE_SIGNAL = signal.SIGUSR1
# Asks a rank for its stacks. The default action of this signal is to be ignored, so a rank that is no Python script,
# or not yet one, is not hurt.
STACKS_SIGNAL = signal.SIGURG

_held: list[int] = []  # notices that came before anybody listened


def hold_notices() -> None:
    """Remember notices from now on instead of dying of them; `take_held` gives them out. Main thread only.

    A handler, because a signal that is blocked or ignored would be so in every program that is started, too.
    """
    signal.signal(NOTICE_SIGNAL, lambda number, _frame: _held.append(number))


def take_held() -> list[int]:
    """Return the notices that were held, each once."""
    held = _held.copy()
    _held.clear()
    return held
