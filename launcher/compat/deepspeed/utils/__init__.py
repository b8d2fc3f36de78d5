"""`deepspeed.utils`: the logger, leaf modules, and access to what is sharded."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from launcher.base.log import get_logger
from launcher.compat.ranks import get_rank
from launcher.zero import (
    get_z3_leaf_modules,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
)

from . import groups, zero_to_fp32

__all__ = [
    "get_z3_leaf_modules",
    "groups",
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "zero_to_fp32",
]

logger = get_logger()  # the engine's own: a level that is set here holds for its lines


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given ranks; None or [-1]: on all."""
    rank = get_rank()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)
