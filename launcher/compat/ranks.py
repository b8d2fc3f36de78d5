"""Ranks and process groups by DeepSpeed's names, also for a process that is alone: `deepspeed.comm`."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from launcher.base import env
from launcher.comm import groups
from launcher.comm.device import local_device, use_local_device


@functools.wraps(groups.init_distributed)
def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Do what `launcher.init_distributed` does; a process that is alone gets a process group of its own, too.

    Callers read `torch.distributed.get_rank()` right after. Raises: as `launcher.init_distributed`.
    """
    groups.init_distributed(*args, **kwargs)
    given = inspect.signature(groups.init_distributed).bind(*args, **kwargs).arguments
    if not dist.is_initialized() and given.get("dist_init_required") is not False:
        backend = given.get("dist_backend") or dist.get_default_backend_for_device(local_device())
        store = dist.HashStore()  # type: ignore[attr-defined]  # torch's own annotations leave it out
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def get_rank(group: ProcessGroup | None = None) -> int:
    """Return this process's rank in `group` (None: all ranks); 0 where there is no process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Return the ranks of `group` (None: all ranks); 1 where there is no process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """Return this process's rank on its node."""
    return int(os.environ.get(env.LOCAL_RANK.name, "0"))


def get_world_group() -> ProcessGroup | None:
    """Return the process group of all ranks; None where there is none."""
    return dist.group.WORLD if dist.is_initialized() else None


def barrier(group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """Wait for all ranks of `group`. Every rank must call it."""
    if not dist.is_initialized():
        return None
    device = use_local_device()
    return dist.barrier(group, async_op=async_op, device_ids=None if device.index is None else [device.index])
