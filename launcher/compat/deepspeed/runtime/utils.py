"""`deepspeed.runtime.utils`: what scripts call there."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

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

clip_grad_norm_ = torch.nn.utils.clip_grad_norm_  # of plain parameters: the engine clips those that it trains


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log on rank 0 what this process uses of its device. Only with `force`: calls without it stay in scripts."""
    if force and get_rank() == 0:
        use = memory_use(local_device())
        get_logger().info("%s: %s in use, at most %.2f GiB so far", message, use, use.peak_bytes / GIB)


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy where it is installed, and torch on every device."""
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(seed)
    torch.manual_seed(seed)


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Return the 2-norm of a whole from the 2-norms of its parts."""
    return float(sum(norm**2 for norm in norm_list) ** 0.5)


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return the one value that all items have. Raises: RuntimeError where they have several, or none."""
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"one value was expected, got {sorted(map(repr, found))}")
    return found.pop()


def move_to_device(item: Any, device: torch.device | str) -> Any:
    """Return `item` with its tensors on `device`; lists, tuples and dicts of any depth are copied."""
    if isinstance(item, Tensor):
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
