"""Ranks and process groups by DeepSpeed's names, also for a process that is alone: `deepspeed.comm`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from launcher.base import env
from launcher.base.errors import EngineAssertionError
from launcher.comm import groups
from launcher.comm.device import local_device, use_local_device


@functools.wraps(groups.init_distributed)
def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Do what `launcher.init_distributed` does; a process that is alone gets a process group of its own, too.

    Callers read `torch.distributed.get_rank()` right after.
    Raises: as `launcher.init_distributed`; EngineAssertionError without a group where `dist_init_required` is False.
    """
    groups.init_distributed(*args, **kwargs)
    given = inspect.signature(groups.init_distributed).bind(*args, **kwargs).arguments
    if dist.is_initialized():
        return
    if given.get("dist_init_required") is False:
        raise EngineAssertionError(
            "there is no process group, and dist_init_required is False",
            hint="start one with torch.distributed, or leave dist_init_required out",
        )
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


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """Return the ranks of `group` (None: all ranks), in the order of their ranks in it; [0] without a process group."""
    return dist.get_process_group_ranks(group) if dist.is_initialized() else [0]


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    """Return all ranks as a mesh of the devices that they train on. Every rank must call it.

    mesh_shape: the ranks in each dimension; their product is the number of ranks.
    Side effects: a process group for each dimension, and that of all ranks where there is none.
    Raises: RuntimeError of torch for another product.
    """
    init_distributed()
    return init_device_mesh(local_device().type, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def barrier(group: ProcessGroup | None = None, async_op: bool = False, device_ids: Sequence[int] | None = None) -> Any:
    """Wait for all ranks of `group`. Every rank must call it.

    device_ids: the index of this rank's device; None: the one that it trains on.
    """
    if not dist.is_initialized():
        return None
    device = use_local_device()
    own = None if device.index is None else [device.index]
    return dist.barrier(group, async_op=async_op, device_ids=own if device_ids is None else list(device_ids))
