"""More of `deepspeed.utils.logging`: levels, and messages to stdout and to files. Also versions of torch."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.torch_version import TorchVersion

from launcher.base.errors import EngineError
from launcher.compat.ranks import get_rank
from launcher.compat.utils import logger

log_levels = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}


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
    """Return the level that a name such as "info" means. Raises: ValueError."""
    if log_level_str.lower() not in log_levels:
        raise ValueError(f'unknown log level "{log_level_str}"; use one of {", ".join(log_levels)}')
    return int(log_levels[log_level_str.lower()])


def get_current_level() -> int:
    """Return the level of the engine's logger."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Whether the engine's logger shows messages of that level. Raises: ValueError."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


def required_torch_version(min_version: str | float | None = None, max_version: str | float | None = None) -> bool:
    """Whether torch is at least, and at most, of a version. Raises: AssertionError without either."""
    if min_version is None and max_version is None:
        raise AssertionError("required_torch_version() needs min_version or max_version")
    own = TorchVersion(torch.__version__)
    is_enough = min_version is None or own >= str(min_version)
    return is_enough and (max_version is None or own <= str(max_version))
