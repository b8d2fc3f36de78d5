"""The project's logger: plain lines on stdout, without touching the root logger."""

from __future__ import annotations

import logging
import sys

_NAME = "launcher"


def get_logger() -> logging.Logger:
    """Return the one logger of the engine, with a stdout handler attached once."""
    logger = logging.getLogger(_NAME)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # a user's root handlers would print each line twice
    return logger
