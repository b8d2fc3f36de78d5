"""`deepspeed.utils.logging`: the engine's logger, and lines of chosen ranks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.compat.ranks import get_rank

__all__ = ["log_dist", "log_dist_once", "logger", "print_rank_0", "set_log_level_from_string"]

logger = get_logger()  # the engine's own: a level that is set here holds for its lines


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given ranks; None or [-1]: on all."""
    rank = get_rank()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Do what `log_dist` does, at the first call with these arguments."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def print_rank_0(message: str) -> None:
    """Log `message` on rank 0."""
    log_dist(message, [0])


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of the engine's logger, such as "warning". Raises: EngineError for an unknown level."""
    level = logging.getLevelName(log_level_str.upper())
    if not isinstance(level, int):
        raise EngineError(f'unknown log level "{log_level_str}"', hint="use debug, info, warning, error or critical")
    (custom_logger or logger).setLevel(level)
