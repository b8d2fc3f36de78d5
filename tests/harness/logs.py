"""What the package logs while a test runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from launcher.base.log import get_logger


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the messages."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    get_logger().addHandler(handler)
    try:
        yield lines
    finally:
        get_logger().removeHandler(handler)
