"""`deepspeed.utils.groups`: the axes of the engine that was built last; before, all ranks have different samples."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from launcher.comm.mesh import current_mesh
from launcher.compat import ranks, ulysses
from launcher.compat.experts import (
    _get_expert_broadcast_src_rank,
    _get_expert_data_parallel_group,
    _get_expert_data_parallel_group_dict,
    _get_expert_data_parallel_group_ranks,
    _get_expert_data_parallel_rank,
    _get_expert_data_parallel_world_size,
    _get_expert_parallel_group,
    _get_expert_parallel_group_dict,
    _get_expert_parallel_group_ranks,
    _get_expert_parallel_rank,
    _get_expert_parallel_src_rank,
    _get_expert_parallel_world_size,
    _get_max_expert_parallel_group,
    _get_max_expert_size,
    _get_max_expert_size_name,
)

__all__ = [
    "_get_data_parallel_group",
    "_get_data_parallel_group_ranks",
    "_get_data_parallel_rank",
    "_get_data_parallel_world_size",
    "_get_expert_broadcast_src_rank",
    "_get_expert_data_parallel_group",
    "_get_expert_data_parallel_group_dict",
    "_get_expert_data_parallel_group_ranks",
    "_get_expert_data_parallel_rank",
    "_get_expert_data_parallel_world_size",
    "_get_expert_parallel_group",
    "_get_expert_parallel_group_dict",
    "_get_expert_parallel_group_ranks",
    "_get_expert_parallel_rank",
    "_get_expert_parallel_src_rank",
    "_get_expert_parallel_world_size",
    "_get_max_expert_parallel_group",
    "_get_max_expert_size",
    "_get_max_expert_size_name",
    "_get_model_parallel_rank",
    "_get_model_parallel_world_size",
    "_get_sequence_parallel_group",
    "_get_sequence_parallel_rank",
    "_get_sequence_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
]


def _get_data_parallel_group() -> ProcessGroup | None:
    mesh = current_mesh()
    return ranks.get_world_group() if mesh is None or mesh.sizes.model_size == 1 else mesh.data.process_group


def _get_data_parallel_world_size() -> int:
    mesh = current_mesh()
    return ranks.get_world_size() if mesh is None else mesh.sizes.data


def _get_data_parallel_rank() -> int:
    mesh = current_mesh()
    return ranks.get_rank() if mesh is None else mesh.sample_rank


def _get_data_parallel_group_ranks() -> list[int]:
    mesh, rank = current_mesh(), ranks.get_rank()
    if mesh is None:
        return list(range(ranks.get_world_size()))
    return next(found for found in mesh.sizes.ranks_along("data") if rank in found)


def _get_sequence_parallel_group() -> ProcessGroup:
    return ulysses.existing(ulysses.sequence_axis()[0])


def _get_sequence_parallel_world_size() -> int:
    return ulysses.sequence_axis()[1]


def _get_sequence_parallel_rank() -> int:
    return ulysses.sequence_axis()[2]


def _get_model_parallel_world_size() -> int:
    mesh = current_mesh()
    return 1 if mesh is None else mesh.sizes.tensor


def _get_model_parallel_rank() -> int:
    mesh = current_mesh()
    return 0 if mesh is None or mesh.tensor is None else mesh.tensor.rank


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank = _get_model_parallel_rank
