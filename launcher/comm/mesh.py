"""Which ranks do what together: the roles of the ranks' groups.

Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud",
https://arxiv.org/abs/2205.00119: parameters, gradients and states are sharded over a few ranks, and replicated.
Wang et al., "ZeRO++", https://arxiv.org/abs/2306.10209, section 3.2 (hpZ): backward gathers parameters from a second
set of shards, within a node.
Lepikhin et al., "GShard", https://arxiv.org/abs/2006.16668, and Rajbhandari et al., "DeepSpeed-MoE",
https://arxiv.org/abs/2201.05596, section 5: neighbours along the data axis have different experts, which are replicated
over the rest of it.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import gc
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from launcher.base.errors import EngineError
from launcher.comm.device import local_device
from launcher.comm.groups import (
    RankGroup,
    agree_on_group,
    forget_process_groups,
    further_options,
    has_own_reduce_group,
    with_reduce_group,
)
from launcher.comm.hosts import any_rank, node_names
from launcher.comm.pending import drain
from launcher.sharding.mesh import AXES, MeshSizes
from launcher.sharding.pipeline import num_links


@dataclass(frozen=True)
class ParallelMesh:
    """The groups of a rank, by role. Ranks are group ranks throughout."""

    world: RankGroup  # all ranks
    data: RankGroup  # ranks with the same part of the model, and other samples or parts of them: gradients, the norm
    shard: RankGroup  # of these, the ranks that hold one copy of what is sharded between them
    replicate: RankGroup | None = None  # the ranks with the same shards; None: there is one copy
    node: RankGroup | None = None  # ranks that gather parameters for backward; None: those of `shard`
    model: RankGroup | None = None  # ranks that have one copy of the model together; None: each has all of it
    tensor: RankGroup | None = None  # of these, the ranks that have the same layers, each a part of them
    pipeline: RankGroup | None = None  # of these, the ranks that have the same parts of different layers
    links: tuple[RankGroup, ...] = ()  # the same ranks as `pipeline`, for transfers; see `StageTransfers`
    sequence: RankGroup | None = None  # the ranks that have the same samples, each a part of every sequence
    layers: RankGroup | None = None  # all ranks with the same layers, whole or in parts; None: `world`
    sizes: MeshSizes = field(default_factory=lambda: MeshSizes(1))  # of all axes
    expert: RankGroup | None = None  # of `data`, the ranks that have one set of experts together
    of_experts: ParallelMesh | None = None  # for parameters of experts: its `data` are the ranks with the same ones
    nodes: tuple[str, ...] = ()  # of all ranks, where there are other axes than data
    num_averaged: int | None = None  # ranks whose gradients are averaged; None: those of `data`

    @property
    def num_sample_ranks(self) -> int:
        """How many ranks the mean of the gradients is over.

        The gradient of an expert has the samples of all ranks of its set of experts in it before it is reduced.
        """
        return self.data.world_size if self.num_averaged is None else self.num_averaged

    def place_in_data(self, rank: int) -> int:
        """Return the place in `data` of the ranks whose parameters count where a rank of the whole data axis is named.

        For parameters of experts these are the ranks with the same experts as this one: the replica of that rank.
        """
        return rank if self.num_averaged is None else rank // (self.num_averaged // self.data.world_size)

    def any_rank(self, condition: bool) -> bool:
        """Whether a condition holds on any rank of the world. Collective."""
        if self.data.runtime.is_async_device and self.data.world_size == self.world.world_size:
            return any_rank(self.data, [condition])[0]  # between hosts: the device may be far behind
        return any(self.world.communicator.gather_scalars(float(condition)))

    @property
    def model_part(self) -> int:
        """Which part of the model this rank has."""
        return 0 if self.model is None else self.model.rank

    @property
    def sample_rank(self) -> int:
        """The place of this rank along the data axis: which share of the samples it gets."""
        return self.sizes.coordinates(self.world.rank)[AXES.index("data")]

    @property
    def num_copies(self) -> int:
        """How many copies of what is sharded there are."""
        return 1 if self.replicate is None else self.replicate.world_size

    @property
    def label(self) -> str | None:
        """Who works with whom, for the start line; None when all ranks have different data and shard together."""
        if not self.sizes.is_data_alone:
            return self.sizes.text(self.nodes)
        if self.replicate is not None:
            return f"{self.num_copies} copies of the shards, each over {self.shard.world_size} ranks"
        if self.node is not None:
            return f"second shards over {self.node.world_size} ranks, which backward gathers from"
        return None


_current: list[ParallelMesh] = []  # that was built last


def current_mesh() -> ParallelMesh | None:
    """Return the mesh of the engine that was built last, None before the first."""
    return _current[-1] if _current else None


def build_mesh(
    world: RankGroup, sizes: MeshSizes, *, shard_size: int | None = None, node_size: int | None = None
) -> ParallelMesh:
    """Return the mesh of this rank, `current_mesh` from now on. Every rank must call it with the same sizes.

    shard_size: ranks that share one copy of the shards (`mics_shard_size`); None: all with the same part of the model.
    node_size: ranks that share one set of second shards (`zero_hpz_partition_size`); None: there is no second set.
    Neighbours belong together: ranks of a host follow each other. Raises: EngineError for sizes that do not divide the
    ranks, and for these together with other axes than data.
    """
    for key, size in (("mics_shard_size", shard_size), ("zero_hpz_partition_size", node_size)):
        if size is None:
            continue
        where = f"zero_optimization.{key}"
        if not sizes.is_data_alone:
            raise EngineError(
                f"{key} is for data parallelism alone, and this run has {sizes.equation} ranks",
                where=where,
                hint="remove it",
            )
        if sizes.data % size or size < 1:
            raise EngineError(
                f"{key} {size} does not divide the {sizes.data} ranks of this run",
                where=where,
                hint="use a size that does, such as the ranks of a host",
            )
    if shard_size == 1 and sizes.data > 1:
        raise EngineError(
            "mics_shard_size 1 shards nothing",
            where="zero_optimization.mics_shard_size",
            hint="use stage 0, or 2 and more",
        )
    # Asked before groups of neighbours are made: these are to be on one node.
    nodes = tuple(node_names(world)) if not sizes.is_data_alone or shard_size or node_size else ()
    mesh = _mesh(world, sizes, shard_size, node_size)
    if not sizes.is_data_alone:
        mesh = replace(mesh, nodes=nodes)
    _current[:] = [mesh]
    return mesh


def _mesh(world: RankGroup, sizes: MeshSizes, shard_size: int | None, node_size: int | None) -> ParallelMesh:
    if world.process_group is None:
        return ParallelMesh(world, world, world, sizes=sizes)
    if sizes.expert > 1:
        return _with_experts(_data_parallel(world, sizes, None, None), sizes)
    if sizes.model_size > 1:
        return _with_axes(world, sizes)
    return _data_parallel(world, sizes, shard_size, node_size)


def _data_parallel(world: RankGroup, sizes: MeshSizes, shard_size: int | None, node_size: int | None) -> ParallelMesh:
    data = with_reduce_group(world)
    ranks = range(data.world_size)
    shard, replicate = data, None
    if shard_size is not None and shard_size < data.world_size:
        shard = _group_of(world, _rows(ranks, shard_size), "rows", has_reduce_group=True)
        replicate = _group_of(world, [list(ranks[first::shard_size]) for first in range(shard_size)], "columns")
    node = None
    if node_size is not None and 1 < node_size < data.world_size:
        node = _group_of(world, _rows(ranks, node_size), "rows")
    return ParallelMesh(world, data, shard, replicate, node, sizes=sizes)


def _rows(ranks: range, row_size: int) -> list[list[int]]:
    return [list(ranks[first : first + row_size]) for first in range(0, len(ranks), row_size)]


def expert_group(world: RankGroup, sizes: MeshSizes) -> RankGroup:
    """Return the ranks that this one has a set of experts together with. Every rank must call it."""
    return _group_of(world, sizes.ranks_of_experts(), "expert", has_hosts=True)


def _with_experts(mesh: ParallelMesh, sizes: MeshSizes) -> ParallelMesh:
    same = _group_of(mesh.world, sizes.ranks_of_replicas(), "replicas", has_reduce_group=True, has_hosts=True)
    of_experts = replace(mesh, data=same, shard=same, num_averaged=mesh.data.world_size)
    return replace(mesh, expert=expert_group(mesh.world, sizes), of_experts=of_experts)


def _with_axes(world: RankGroup, sizes: MeshSizes) -> ParallelMesh:
    data = _group_of(world, sizes.ranks_along("data", "sequence"), "data", has_reduce_group=True, has_hosts=True)

    def along(axis: str) -> RankGroup | None:
        if getattr(sizes, axis) == 1:
            return None
        # What ranks of one model must know of each other before a step travels between hosts.
        return _group_of(world, sizes.ranks_along(axis), axis, has_hosts=axis != "sequence")

    tensor, pipeline, sequence, layers = along("tensor"), along("pipeline"), along("sequence"), None
    model = pipeline or tensor
    if pipeline is not None:
        layers = _group_of(world, sizes.ranks_along("data", "sequence", "tensor"), "layers")
        if tensor is not None:
            model = _group_of(world, sizes.ranks_along("pipeline", "tensor"), "model", has_hosts=True)
    return ParallelMesh(
        world,
        data,
        data,
        model=model,
        tensor=tensor,
        pipeline=pipeline,
        links=() if pipeline is None else _links(world, sizes, pipeline),
        sequence=sequence,
        layers=layers,
        sizes=sizes,
    )


def _group_of(
    world: RankGroup, ranks: list[list[int]], purpose: str, *, has_reduce_group: bool = False, has_hosts: bool = False
) -> RankGroup:
    """Return the group of this rank among groups of so many ranks, with all communicators that it is going to need.

    has_reduce_group: see `has_own_reduce_group`. has_hosts: its hosts exchange facts of a step where devices are async.
    """
    hosts = subgroup(ranks, f"hosts of {purpose}", "gloo") if has_hosts and world.runtime.is_async_device else None
    has_own = has_reduce_group and has_own_reduce_group(world.device)
    reductions = subgroup(ranks, f"reductions of {purpose}") if has_own else None
    return world.subset(subgroup(ranks, purpose), reductions, hosts)


def _links(world: RankGroup, sizes: MeshSizes, pipeline: RankGroup) -> tuple[RankGroup, ...]:
    """Return the groups in which ranks of a pipeline exchange tensors: see the order in `StageTransfers`."""
    number = num_links(sizes.pipeline) if world.runtime.is_async_device else 1
    if number == 1:
        return (pipeline,)
    ranks = sizes.ranks_along("pipeline")
    return tuple(world.subset(subgroup(ranks, f"links {index} of pipeline")) for index in range(number))


# By the default group, the ranks of all subgroups, and what these are for. Process groups cannot be freed one by one.
_subgroups: dict[tuple[dist.ProcessGroup, tuple[tuple[int, ...], ...], str], dist.ProcessGroup] = {}


def subgroup(ranks: list[list[int]], purpose: str, backend: str | None = None) -> dist.ProcessGroup:
    """Return the process group of this rank among groups of so many ranks, the same one when asked again."""
    world = dist.group.WORLD
    assert world is not None
    key = world, tuple(map(tuple, ranks)), purpose
    if key not in _subgroups:
        agree_on_group(purpose, ranks)
        options = further_options(world, local_device(), backend)
        process_group, _ = dist.new_subgroups_by_enumeration(ranks, **options, group_desc=purpose)
        assert process_group is not None, "every rank is in one of the groups"
        _subgroups[key] = process_group
    return _subgroups[key]


def forget_meshes() -> None:
    """Drop the meshes of this process, at its end."""
    _subgroups.clear()
    _current.clear()


# ---- Leaving the process group in order ----


_EXIT_TIMEOUT = datetime.timedelta(seconds=5)
_GLOO_THREAD = "pt_gloo_runloop"
_POLL_S = 0.001
_IDLE_POLLS = 5  # one is not enough: a thread that waits for the interpreter, which the poll holds, looks idle


@functools.cache
def leave_in_order() -> None:
    """At the normal end of this process wait for transfers under way and end the process group.

    Without it the end of a training script is a race: a rank that leaves while the last step's parameters are still
    being exchanged is aborted by gloo, and NCCL complains. After an exception nothing is waited for: the peers may be
    gone.
    """
    atexit.register(_leave)


def _leave() -> None:
    if hasattr(sys, "last_value"):
        return
    drain(_EXIT_TIMEOUT)
    if dist.is_initialized():  # else the script has ended it, and its threads may still be there
        dist.destroy_process_group()
    forget_meshes()
    forget_process_groups()
    gc.collect()
    deadline_s = time.monotonic() + _EXIT_TIMEOUT.total_seconds()
    num_idle = 0
    while num_idle < _IDLE_POLLS and time.monotonic() < deadline_s:
        num_idle = 0 if _is_gloo_busy() else num_idle + 1
        time.sleep(_POLL_S)


def _is_gloo_busy() -> bool:
    """Whether a thread of gloo still runs.

    A collective is done before its thread has released the tensors. To release one that Python has dropped, the thread
    needs the interpreter; if that is being finalized, the process is aborted.
    """
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name.startswith(_GLOO_THREAD) and rest.split()[0] != "S":
                return True
    return False
