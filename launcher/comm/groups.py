"""Start the default process group of a rank, from the environment or as a world of one."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from launcher.base import env
from launcher.base.errors import UsageError
from launcher.base.log import get_logger


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = False,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start the default process group; called by all ranks, does nothing when it already runs.

    Without RANK and WORLD_SIZE in the environment (a plain `python train.py`) the world is this one
    process and no port is opened. `config` is accepted for DeepSpeed's signature. Side effects: the
    process group, and the current CUDA device (LOCAL_RANK).

    Raises:
        UsageError: MPI discovery was asked for, or the rank variables are missing or not numbers.
    """
    if auto_mpi_discovery:
        raise UsageError("auto_mpi_discovery is not supported", hint="start the ranks with `launch`")
    if dist.is_initialized() or dist_init_required is False:
        return
    rank = rank if rank >= 0 else _read_int(env.RANK.name)
    world_size = world_size if world_size > 0 else _read_int(env.WORLD_SIZE.name)
    if (rank < 0) != (world_size < 0):
        raise UsageError("RANK and WORLD_SIZE must be set together", hint="start the ranks with `launch`")
    backend = dist_backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(max(_read_int(env.LOCAL_RANK.name), 0))
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if world_size < 0:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, **options)
        return
    if init_method is None:
        os.environ.setdefault(env.MASTER_ADDR.name, "127.0.0.1")
        os.environ.setdefault(env.MASTER_PORT.name, str(distributed_port))
    dist.init_process_group(
        backend, init_method=init_method or "env://", rank=rank, world_size=world_size, **options
    )
    if verbose and rank == 0:
        get_logger().info("process group %s · world %d", backend, world_size)


def _read_int(name: str) -> int:
    text = os.environ.get(name)
    if text is None:
        return -1
    if not text.isdigit():
        raise UsageError(f"{name} must be a whole number, got {text!r}", where=name)
    return int(text)
