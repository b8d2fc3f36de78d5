"""Which ranks do what together: the roles of the ranks' groups, over torch's DeviceMesh.

Zhang et al., "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud",
https://arxiv.org/abs/2205.00119: parameters, gradients and states are sharded over a few ranks, and replicated.
Wang et al., "ZeRO++", https://arxiv.org/abs/2306.10209, section 3.2 (hpZ): backward gathers parameters from a second
set of shards, within a node.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from launcher.base.errors import EngineError
from launcher.comm.groups import RankGroup


@dataclass(frozen=True)
class ParallelMesh:
    """The groups of a rank, by role. Ranks are group ranks throughout."""

    data: RankGroup  # ranks with different data and the same model: the loss, the norm, what is unused
    shard: RankGroup  # of these, the ranks that hold one copy of what is sharded between them
    replicate: RankGroup | None = None  # the ranks with the same shards; None: there is one copy
    node: RankGroup | None = None  # ranks that gather parameters for backward; None: those of `shard`

    @property
    def num_copies(self) -> int:
        """How many copies of what is sharded there are."""
        return 1 if self.replicate is None else self.replicate.world_size

    @property
    def label(self) -> str | None:
        """Who shards with whom, for the start line; None when all ranks do."""
        if self.replicate is not None:
            return f"{self.num_copies} copies of the shards, each over {self.shard.world_size} ranks"
        if self.node is not None:
            return f"second shards over {self.node.world_size} ranks, which backward gathers from"
        return None


def build_mesh(data: RankGroup, *, shard_size: int | None = None, node_size: int | None = None) -> ParallelMesh:
    """Return the mesh of this rank. Every rank must call it with the same sizes.

    shard_size: ranks that share one copy of the shards (`mics_shard_size`); None: all. node_size: ranks that share one
    set of second shards (`zero_hpz_partition_size`); None: there is no second set. Neighbours belong together: ranks of
    a host follow each other. Raises: EngineError for sizes that do not divide the ranks.
    """
    for key, size in (("mics_shard_size", shard_size), ("zero_hpz_partition_size", node_size)):
        if size is not None and (data.world_size % size or size < 1):
            raise EngineError(
                f"{key} {size} does not divide the {data.world_size} ranks of this run",
                where=f"zero_optimization.{key}",
                hint="use a size that does, such as the ranks of a host",
            )
    if shard_size == 1 and data.world_size > 1:
        raise EngineError(
            "mics_shard_size 1 shards nothing",
            where="zero_optimization.mics_shard_size",
            hint="use stage 0, or 2 and more",
        )
    if data.process_group is None:
        return ParallelMesh(data, data)
    shard, replicate = data, None
    if shard_size is not None and shard_size < data.world_size:
        rows, second = _rows(data.process_group, data.device.type, shard_size)
        shard = data.of_ranks(rows.get_group("within"), second)
        replicate = data.of_ranks(rows.get_group("across"))
    node = None
    if node_size is not None and 1 < node_size < data.world_size:
        node = data.of_ranks(_rows(data.process_group, data.device.type, node_size)[0].get_group("within"))
    return ParallelMesh(data, shard, replicate, node)


@functools.cache
def _rows(world: dist.ProcessGroup, device_type: str, row_size: int) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """Return all ranks as rows of neighbours, and a further process group of this rank's row.

    Once a process: process groups cannot be freed one by one.
    """
    num_rows = world.size() // row_size
    mesh = init_device_mesh(device_type, (num_rows, row_size), mesh_dim_names=("across", "within"))
    second, _ = dist.new_subgroups(row_size, group_desc="reductions")
    return mesh, second


def forget_meshes() -> None:
    """Drop the meshes of this process, at its end."""
    _rows.cache_clear()
