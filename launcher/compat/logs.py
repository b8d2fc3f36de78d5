"""`deepspeed.utils.logging`: the engine's own logger, levels by name, and messages of some ranks."""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

from launcher.base.errors import EngineError, EngineValueError
from launcher.base.log import get_logger
from launcher.compat.ranks import get_rank

logger = get_logger()  # the engine's own: a level that is set here holds for its lines
log_levels = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given ranks; None or [-1]: on all."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        logger.log(level, "%s", text)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Do what `log_dist` does, at the first call with these arguments."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


@functools.cache
def warning_once(message: str, *args: Any) -> None:
    """Log a warning at the first call with these arguments."""
    logger.warning(message, *args)


# Scripts call them at the logger, too.
logger.log_dist_once = log_dist_once  # type: ignore[attr-defined]
logger.warning_once = warning_once  # type: ignore[attr-defined]


class LoggerFactory:
    """Makes loggers that write to stdout."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.INFO) -> logging.Logger:
        """Return the logger of a name, with one handler. Raises: ValueError without a name."""
        if name is None:
            raise ValueError("name for logger cannot be None")
        made = logging.getLogger(name)
        made.setLevel(level)
        made.propagate = False
        if not made.handlers:
            handler = logging.StreamHandler(sys.stdout)
            handler.setFormatter(
                logging.Formatter("[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d] %(message)s")
            )
            made.addHandler(handler)
        return made


def get_dist_msg(message: str, ranks: Sequence[int] | None = None) -> str | None:
    """Return `message` with this rank's number, as `log_dist` writes it; None where it writes nothing."""
    if not ranks or -1 in ranks or get_rank() in ranks:
        return f"[rank {get_rank()}] {message}"
    return None


def print_rank_0(message: str) -> None:
    """Log `message` on rank 0."""
    log_dist(message, [0])


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Write `message` to stdout on the given ranks, whatever the level of the log is; None or [-1]: on all."""
    if not ranks or -1 in ranks or get_rank() in ranks:
        sys.stdout.write(f"[rank {get_rank()}] {message}\n")


def print_json_dist(message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | None = None) -> None:
    """Write `message` and this rank's number to the file `path`, on the given ranks; None or [-1]: on all.

    Raises: EngineError without a path; OSError.
    """
    if path is None:
        raise EngineError("print_json_dist() writes a file", hint="give path=...")
    if not ranks or -1 in ranks or get_rank() in ranks:
        with open(path, "w") as file:
            json.dump({**message, "rank": get_rank()}, file)


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the level that a name such as "info" means. Raises: EngineValueError."""
    if log_level_str.lower() not in log_levels:
        raise EngineValueError(f'unknown log level "{log_level_str}"', hint=f"use one of {', '.join(log_levels)}")
    return int(log_levels[log_level_str.lower()])


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger, by default the engine's, such as "warning". Raises: EngineValueError."""
    (custom_logger or logger).setLevel(get_log_level_from_string(log_level_str))


def get_current_level() -> int:
    """Return the level of the engine's logger."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the engine's logger shows messages of that level. Raises: EngineValueError."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)
