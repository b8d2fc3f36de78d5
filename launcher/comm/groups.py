"""The process group of a job: how it starts, and what the engine needs to know about it."""

from __future__ import annotations

import datetime
import functools
import os
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from launcher.base import env
from launcher.base.errors import EngineError, UsageError
from launcher.base.progress import phase
from launcher.comm.buffers import BufferPool
from launcher.comm.communicator import Communicator, communicator_for
from launcher.comm.device import DeviceRuntime, HostDeviceCopier, backend_name, local_device, use_local_device
from launcher.comm.pending import Call, begin_call, end_call, name_next, waits_for
from launcher.comm.streams import Streams
from launcher.comm.torch_internals import default_store, num_groups
from launcher.schedulers.rank import scheduler_rank

DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)
_DEFAULT_PORT = 29500
_OWN, _SHARED = "own", "shared"  # of LAUNCH_REDUCE_GROUP
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05  # between two looks into the store


_made: list[weakref.ref[RankGroup]] = []  # of this process, for its end


@dataclass(frozen=True)
class RankGroup:
    """Ranks that do something together, such as averaging gradients. Ranks are those of the group, not of the world."""

    rank: int
    world_size: int
    process_group: dist.ProcessGroup | None  # None: a single process, no communication
    runtime: DeviceRuntime = field(compare=False, repr=False)  # shared by all groups of an engine
    reduce_process_group: dist.ProcessGroup | None = None  # of the same ranks; None: reductions have no own one
    host_process_group: dist.ProcessGroup | None = None  # of the same ranks, for host memory; see `hosts`

    def __post_init__(self) -> None:
        _made.append(weakref.ref(self, _made.remove))

    @property
    def device(self) -> torch.device:
        """Where the tensors of collectives are."""
        return self.runtime.device

    @property
    def buffers(self) -> BufferPool:
        """Memory of everything in flight on the device."""
        return self.runtime.buffers

    @property
    def host_group(self) -> dist.ProcessGroup | None:
        """What carries host memory between these ranks, one message after another; None: a single process."""
        return self.host_process_group or self.process_group

    @property
    def streams(self) -> Streams:
        """What runs beside the computing on the device."""
        return self.runtime.streams

    @property
    def copier(self) -> HostDeviceCopier:
        """The copies between the device and host memory."""
        return self.runtime.copier

    @functools.cached_property
    def communicator(self) -> Communicator:
        """Its collectives."""
        return communicator_for(self.process_group, self.runtime)

    @functools.cached_property
    def reduce_group(self) -> RankGroup:
        """The same ranks, for reductions: collectives of the two are not ordered among each other."""
        if self.reduce_process_group is None:
            return self
        return RankGroup(self.rank, self.world_size, self.reduce_process_group, self.runtime)

    def alone(self) -> RankGroup:
        """Return this rank as a group of its own, on the same device."""
        return RankGroup(0, 1, None, self.runtime)

    def subset(
        self,
        process_group: dist.ProcessGroup,
        reduce_process_group: dist.ProcessGroup | None = None,
        host_process_group: dist.ProcessGroup | None = None,
    ) -> RankGroup:
        """Return other ranks on the same device: those of a process group that this one belongs to."""
        is_alone = process_group.size() == 1
        return RankGroup(
            process_group.rank(),
            process_group.size(),
            None if is_alone else process_group,
            self.runtime,
            None if is_alone else reduce_process_group,
            None if is_alone else host_process_group,
        )


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

    Every rank must call it. This rank's GPU becomes the current device, also when the group existed before. Backend:
    NCCL on GPUs, else gloo; with "gloo" the engine trains on the CPU. Without RANK and WORLD_SIZE in the environment
    they come from mpirun, mpiexec or srun where one of them has started this process, and `os.environ` gets what torch
    reads: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. Else (a plain `python train.py`) the world is this
    process alone and no group is started.

    auto_mpi_discovery: False refuses the ranks of mpirun, mpiexec and srun.
    distributed_port: MASTER_PORT where neither the environment nor the scheduler's job gives one.
    `verbose` and `config` are part of the signature scripts use, and without effect.

    Raises: EngineError when the environment is incomplete or the port is in use, UsageError when what a scheduler says
    is incomplete.
    """
    if not dist.is_initialized():
        if rank < 0 and init_method is None:
            is_wanted = auto_mpi_discovery and dist_init_required is not False
            _take_from_scheduler(is_wanted=is_wanted, port=distributed_port)
        if dist_init_required is not False and _is_of_several(rank, init_method, distributed_port):
            _start(dist_backend, init_method, timeout or DEFAULT_TIMEOUT, rank, world_size)
    use_local_device()  # also where the script has started the group


def _is_of_several(rank: int, init_method: str | None, port: int) -> bool:
    """Whether there is a group to start; then the environment has what torch reads. Raises: EngineError."""
    if rank < 0 and env.RANK.name not in os.environ and init_method is None:
        if os.environ.get(env.WORLD_SIZE.name, "1") != "1":
            raise _incomplete([env.RANK.name])
        return False
    if init_method is None:
        os.environ.setdefault(env.MASTER_PORT.name, str(port))
        needed = [env.MASTER_ADDR] if rank >= 0 else [env.RANK, env.WORLD_SIZE, env.MASTER_ADDR]
        missing = [variable.name for variable in needed if variable.name not in os.environ]
        if missing:
            raise _incomplete(missing)
    return True


@phase("joining the other ranks")
def _start(
    dist_backend: str | None, init_method: str | None, timeout: datetime.timedelta, rank: int, world_size: int
) -> None:
    device = use_local_device(dist_backend)
    own = dist.get_default_backend_for_device(device)  # NCCL on GPUs
    backend = dist_backend or own
    try:
        dist.init_process_group(
            backend,
            init_method=init_method,
            timeout=timeout,
            rank=rank,
            world_size=world_size,
            # NCCL connects at once then, and never has to guess which GPU a rank has.
            device_id=device if own in backend and device.type != "cpu" else None,
            pg_options=_nccl_options(own if own in backend else backend, timeout),
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
    scheduled = scheduler_rank(os.environ)
    if scheduled is None:
        return
    if not is_wanted:
        raise EngineError(
            f"{scheduled.started_by} has started this process as rank {scheduled.rank} of {scheduled.world_size}, and"
            " auto_mpi_discovery or dist_init_required is False: each rank would train alone",
            hint="leave these arguments out, or export RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT",
        )
    os.environ.update(scheduled.variables(os.environ, port))


def _incomplete(missing: list[str]) -> EngineError:
    return EngineError(
        f"the environment of this rank lacks {', '.join(missing)}",
        hint="start the script with `launch`, which sets them all",
    )


def world_group(*, has_reduce_group: bool = False, runtime: DeviceRuntime | None = None) -> RankGroup:
    """Return the group of all ranks, or of this process alone when none was started.

    has_reduce_group: see `with_reduce_group`. runtime: of its device; None: a new one.
    """
    runtime = runtime or DeviceRuntime(local_device())
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return RankGroup(0, 1, None, runtime)
    world = RankGroup(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, runtime)
    return with_reduce_group(world) if has_reduce_group else world


def with_reduce_group(world: RankGroup) -> RankGroup:
    """Return all ranks with what carries their reductions, and what their hosts exchange. Every rank must call it.

    See `has_own_reduce_group`.
    """
    group, runtime = world.process_group, world.runtime
    if group is None:
        return world
    own = _further_group(group, runtime.device, "reductions") if has_own_reduce_group(runtime.device) else None
    hosts = _further_group(group, runtime.device, "hosts", "gloo") if runtime.is_async_device else None
    return RankGroup(world.rank, world.world_size, group, runtime, own, hosts)


def has_own_reduce_group(device: torch.device) -> bool:
    """Return whether reductions have a process group of their own beside that of gathers. Raises: UsageError.

    [Note: one communicator on NCCL] Two communicators at work on one GPU are safe only while the kernels of both fit on
    it at once and nothing synchronizes the device in between, as a `cudaFree` under memory pressure does (NCCL's user
    guide, "Using multiple NCCL communicators concurrently"). So gathers and reductions have one there, and one order on
    every rank: see `CollectiveOrder`. On gloo messages of both travel side by side.
    """
    wanted = os.environ.get(env.REDUCE_GROUP.name)
    if wanted not in (None, _OWN, _SHARED):
        raise UsageError(f"{wanted!r} is neither {_OWN} nor {_SHARED}", where=env.REDUCE_GROUP.name)
    world = dist.group.WORLD
    is_gloo = world is not None and backend_name(world, device) == "gloo"
    return wanted == _OWN or (wanted is None and is_gloo)


def is_first_rank() -> bool:
    """Whether this process is the one of all ranks that prints for them."""
    return not dist.is_initialized() or dist.get_rank() == 0


# Further process groups of all ranks, by purpose: beside the default group they were made for.
_further_groups: dict[str, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def group_of_flags() -> dist.ProcessGroup | None:
    """Return a process group of all ranks for host memory whose order is its own; None for a single process.

    The same one as long as the default group lasts. Every rank must call it.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or dist.get_world_size() == 1:
        return None
    return _further_group(world, local_device(), "flags", "gloo")


def _further_group(
    world: dist.ProcessGroup, device: torch.device, purpose: str, backend: str | None = None
) -> dist.ProcessGroup:
    """Return a process group of all ranks for one purpose, the same one as long as the default group lasts."""
    if purpose not in _further_groups or _further_groups[purpose][0] is not world:
        agree_on_group(purpose)
        group = dist.new_group(**further_options(world, device, backend), group_desc=purpose)
        _further_groups[purpose] = (world, group)
    return _further_groups[purpose][1]


def timeout_of(world: dist.ProcessGroup, device: torch.device) -> datetime.timedelta | None:
    """Return the timeout of a process group, which a further one would not take over; None: the backend's own."""
    return getattr(world._get_backend(device).options, "_timeout", None)


def further_options(world: dist.ProcessGroup, device: torch.device, backend: str | None) -> dict[str, Any]:
    """Return with what torch makes a process group beside the default one.

    backend: "gloo" for host memory; None: that of the default group.
    """
    timeout = timeout_of(world, device)
    options = _nccl_options(backend or backend_name(world, device), timeout)
    return {"timeout": timeout, "backend": backend, "pg_options": options}


def _nccl_options(backend: str | None, timeout: datetime.timedelta | None) -> Any:
    """Return options by which NCCL's kernels go ahead of the computing's; None for another backend.

    For one call: torch writes into them which group they are of. timeout: of the group. See [Note: side streams].
    """
    if backend != "nccl" or not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        options._timeout = timeout  # torch warns where it is another than the group's
    return options


# [Note: groups cannot cross] Torch names a process group by a counter of each process, makes it without a barrier, and
# gloo connects whoever gives the same name. Where one rank makes a group more than the others, because a cache was
# empty there or an exception came early, its next group is connected with another one of its peers: both are made, and
# the first collective in them waits forever or mixes up two purposes. So before a group is made all ranks compare
# through the store which one it is, and none makes it where they differ.


def agree_on_group(purpose: str, ranks: Sequence[Sequence[int]] | None = None) -> None:
    """Compare with all ranks which process group is made next. Every rank must call it, right before it makes one.

    ranks: those of each group that is made; None: one of all ranks. Raises: EngineError on every rank where they differ
    in what for, of which ranks or after how many others they make it, or where one of them does not come in time.
    """
    world = dist.group.WORLD
    if world is None or world.size() == 1 or dist.get_backend() == "fake":  # a rehearsal has no peers
        return
    members = "all ranks" if ranks is None else f"ranks {', '.join(map(str, ranks[:8]))}"
    num_before = num_groups()
    name_next(f'the process group "{purpose}" of {members}')
    call = begin_call("new_group", world)
    end_call()
    own = f'"{purpose}" of {members} on rank {{}}, after {num_before} others'
    text = _difference_of_groups(world, call, own)
    if text:
        raise EngineError(
            f"ranks make different process groups: {text}",
            hint="every rank must call dist.new_group(), initialize() and MoE layers equally often, in the same order",
        )


def _difference_of_groups(world: dist.ProcessGroup, call: Call, own: str) -> str:
    """Return how the groups that ranks make next differ, on every rank alike; "" where they do not."""
    store, prefix = default_store(), f"launch/group/{call.number}"
    keys = [f"{prefix}/{rank}" for rank in range(world.size())]
    verdict = f"{prefix}/difference"
    store.set(keys[world.rank()], own)
    limit = timeout_of(world, local_device()) or DEFAULT_TIMEOUT
    end_s = time.monotonic() + limit.total_seconds()
    expected, pause_s = keys if world.rank() == 0 else [verdict], _FIRST_PAUSE_S
    with waits_for(call, "new_group"):
        # Asked again and again: a wait in the store would keep the watch over the order of collectives out of it.
        while not store.check(expected):
            if time.monotonic() > end_s:
                absent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
                return f"{own.format(world.rank())}; nothing on rank {', '.join(absent) or '0'}"
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    if world.rank() == 0:
        first_of: dict[str, int] = {}  # what ranks make -> the first rank that does
        for rank, key in enumerate(keys):
            first_of.setdefault(store.get(key).decode(), rank)
        parts = [text.format(rank) for text, rank in first_of.items()]
        store.set(verdict, "; ".join(parts) if len(parts) > 1 else "")
        for key in keys:
            store.delete_key(key)
    return str(store.get(verdict).decode())


def forget_process_groups() -> None:
    """Drop every reference to a process group of torch that a group here holds, at the end of the process.

    What ends with the interpreter is too late: the threads of a process group may need it as they end.
    """
    _further_groups.clear()
    for reference in list(_made):
        group = reference()
        if group is not None:
            group.__dict__.pop("communicator", None)
            group.__dict__.pop("reduce_group", None)
            object.__setattr__(group, "process_group", None)
            object.__setattr__(group, "reduce_process_group", None)
            object.__setattr__(group, "host_process_group", None)
