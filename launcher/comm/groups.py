"""The process group of a job: how it starts, and what the engine needs to know about it."""

from __future__ import annotations

import copy
import datetime
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from launcher.base import env
from launcher.base.errors import EngineError
from launcher.base.scheduler_rank import scheduler_rank
from launcher.comm.buffers import BufferPool
from launcher.comm.link import HostLink

DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)
_DEFAULT_PORT = 29500


@dataclass(frozen=True)
class DataParallelGroup:
    """The ranks that hold the same model and different data."""

    rank: int
    world_size: int
    device: torch.device
    process_group: dist.ProcessGroup | None  # None: a single process, no communication
    reduce_process_group: dist.ProcessGroup | None = None  # of the same ranks; None: reductions have no own one
    buffers: BufferPool = field(init=False, compare=False, repr=False)  # memory of everything in flight
    link: HostLink = field(init=False, compare=False, repr=False)  # to and from host memory

    def __post_init__(self) -> None:
        object.__setattr__(self, "buffers", BufferPool(self.device))
        object.__setattr__(self, "link", HostLink(self.device))

    @property
    def reductions(self) -> DataParallelGroup:
        """The same ranks, for reductions: collectives of the two are not ordered among each other."""
        if self.reduce_process_group is None:
            return self
        group = copy.copy(self)
        object.__setattr__(group, "process_group", self.reduce_process_group)
        return group

    def of_ranks(
        self, process_group: dist.ProcessGroup, reduce_process_group: dist.ProcessGroup | None = None
    ) -> DataParallelGroup:
        """Return other ranks on the same device: those of a process group that this one belongs to."""
        group = copy.copy(self)
        size = process_group.size()
        object.__setattr__(group, "rank", process_group.rank())
        object.__setattr__(group, "world_size", size)
        object.__setattr__(group, "process_group", process_group if size > 1 else None)
        object.__setattr__(group, "reduce_process_group", reduce_process_group if size > 1 else None)
        return group


def local_device() -> torch.device:
    """Return this rank's device: its own GPU where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get(env.LOCAL_RANK.name, "0"))
    if local_rank >= torch.cuda.device_count():
        raise EngineError(
            f"LOCAL_RANK {local_rank} has no GPU: this process sees {torch.cuda.device_count()}",
            hint="start fewer ranks on this host, or widen CUDA_VISIBLE_DEVICES",
        )
    return torch.device("cuda", local_rank)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = _DEFAULT_PORT,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start the default process group from the environment `launch` sets; a group that exists is kept.

    Every rank must call it. Backend: NCCL on GPUs, else gloo. Without RANK and WORLD_SIZE in the environment they come
    from mpirun, mpiexec or srun where one of them has started this process, and `os.environ` gets what torch reads:
    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. Else (a plain `python train.py`) the world is this process
    alone and no group is started.

    auto_mpi_discovery: False refuses the ranks of mpirun, mpiexec and srun.
    distributed_port: MASTER_PORT where neither the environment nor the scheduler's job gives one.
    `verbose` and `config` are part of the signature scripts use, and without effect.

    Raises: EngineError when the environment is incomplete or the port is in use, UsageError when what a scheduler says
    is incomplete.
    """
    if dist.is_initialized():
        return
    if rank < 0 and init_method is None:
        _take_from_scheduler(is_wanted=auto_mpi_discovery and dist_init_required is not False, port=distributed_port)
    if dist_init_required is False:
        return
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if rank < 0 and env.RANK.name not in os.environ and init_method is None:
        if os.environ.get(env.WORLD_SIZE.name, "1") != "1":
            raise _incomplete([env.RANK.name])
        return
    if init_method is None:
        os.environ.setdefault(env.MASTER_PORT.name, str(distributed_port))
        needed = [env.MASTER_ADDR] if rank >= 0 else [env.RANK, env.WORLD_SIZE, env.MASTER_ADDR]
        missing = [variable.name for variable in needed if variable.name not in os.environ]
        if missing:
            raise _incomplete(missing)
    backend = dist_backend or ("nccl" if device.type == "cuda" else "gloo")
    try:
        dist.init_process_group(
            backend,
            init_method=init_method,
            timeout=timeout or DEFAULT_TIMEOUT,
            rank=rank,
            world_size=world_size,
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise EngineError(
            "the port on which rank 0 waits for the others is in use",
            where=f"{env.MASTER_PORT.name}={os.environ.get(env.MASTER_PORT.name)}",
            hint="give another (`launch --master-port`, or export MASTER_PORT); `launch` finds a free one by itself",
        ) from None


def _take_from_scheduler(*, is_wanted: bool, port: int) -> None:
    """Set the variables of a rank that mpirun, mpiexec or srun has started. Raises: EngineError, UsageError."""
    if env.RANK.name in os.environ:
        return
    found = scheduler_rank(os.environ)
    if found is None:
        return
    if not is_wanted:
        raise EngineError(
            f"{found.started_by} has started this process as rank {found.rank} of {found.world_size}, and"
            " auto_mpi_discovery or dist_init_required is False: each rank would train alone",
            hint="leave these arguments out, or export RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
        )
    os.environ.update(found.variables(os.environ, port))


def _incomplete(missing: list[str]) -> EngineError:
    return EngineError(
        f"the environment of this rank lacks {', '.join(missing)}",
        hint="start the script with `launch`, which sets them all",
    )


def data_parallel_group(*, has_reductions: bool = False) -> DataParallelGroup:
    """Return the group of all ranks, or of this process alone when none was started.

    has_reductions: with a communicator of its own for reductions; then every rank must call it.
    """
    device = local_device()
    if not dist.is_initialized():
        return DataParallelGroup(0, 1, device, None)
    if dist.get_world_size() == 1:
        return DataParallelGroup(0, 1, device, None)
    world = dist.group.WORLD
    assert world is not None
    own = _group_of_reductions(world, device) if has_reductions else None
    return DataParallelGroup(dist.get_rank(), dist.get_world_size(), device, world, own)


_reduce_groups: list[tuple[dist.ProcessGroup, dist.ProcessGroup]] = []  # at most one: all ranks, and their second group


def _group_of_reductions(world: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Return a second process group of all ranks, the same one as long as the first one lasts."""
    if not _reduce_groups or _reduce_groups[0][0] is not world:
        options = world._get_backend(device).options  # a new group would not take the timeout over
        group = dist.new_group(timeout=options._timeout, group_desc="reductions")
        _reduce_groups[:] = [(world, group)]
    return _reduce_groups[0][1]
