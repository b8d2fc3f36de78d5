"""`deepspeed.runtime.utils`: what scripts call there."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.comm.device import local_device
from launcher.compat.accelerator import get_accelerator
from launcher.compat.ranks import get_rank
from launcher.monitor.memory import GIB, memory_use

__all__ = [
    "clip_grad_norm_",
    "empty_cache",
    "get_global_norm",
    "get_only_unique_item",
    "move_to_device",
    "see_memory_usage",
    "set_random_seed",
]


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log on rank 0 what this process uses of its device. Only with `force`: calls without it stay in scripts."""
    if force and get_rank() == 0:
        use = memory_use(local_device())
        get_logger().info("%s: %s in use, at most %.2f GiB so far", message, use, use.peak_bytes / GIB)


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy where it is installed, and torch on every device. A seed may have any size."""
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(seed % 2**32)  # it refuses larger ones
    torch.manual_seed(seed % 2**63)


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Return the 2-norm of a whole from the 2-norms of its parts.

    Infinity where one of them says that gradients overflowed: -1, infinity or NaN.
    """
    norms = [float(norm) for norm in norm_list]
    return math.hypot(*norms) if all(math.isfinite(norm) and norm >= 0 for norm in norms) else math.inf


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Scale gradients of plain parameters down to `max_norm`; return their norm before. The engine clips its own.

    Raises: EngineError for `mpu`.
    """
    if mpu is not None:
        raise EngineError("clip_grad_norm_(mpu=...) is not supported", hint="use data parallelism alone")
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return the one value that all items have. Raises: RuntimeError where they have several, or none."""
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"one value was expected, got {sorted(map(repr, found))}")
    return found.pop()


def move_to_device(item: Any, device: torch.device | str) -> Any:
    """Return `item` with its tensors on `device`; lists, tuples and dicts are copied, modules are moved."""
    if isinstance(item, Tensor | nn.Module):
        return item.to(device)
    if isinstance(item, list | tuple):
        values = [move_to_device(value, device) for value in item]
        return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
    if isinstance(item, Mapping):
        return {key: move_to_device(value, device) for key, value in item.items()}
    return item


def empty_cache() -> None:
    """Give unused memory of the device's allocator back."""
    get_accelerator().empty_cache()
