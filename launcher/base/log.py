"""The project's logger: plain lines on stdout, without touching the root logger."""

from __future__ import annotations

import logging
import sys

_logger = logging.getLogger("launcher")


def get_logger() -> logging.Logger:
    """Return the one logger of the engine, with a stdout handler attached once."""
    if not _logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        _logger.addHandler(handler)
        _logger.setLevel(logging.INFO)
        _logger.propagate = False  # a user's root handlers would print each line twice
    return _logger
