"""What an action raises, as text that a rank can hand to its test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def refused(action: Callable[[], Any]) -> str:
    """Return the error that an action raises, as the last line of a stack trace shows it."""
    try:
        action()
    except Exception as error:  # noqa: BLE001  # whatever it is, the test looks at it
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
