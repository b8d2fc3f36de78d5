"""Groups of ranks by the names of `deepspeed.utils.groups` and `deepspeed.runtime.sequence_parallel`.

The axes are those of the engine that was built last; before, all ranks have different samples. `group_name` of experts:
"ep_size_N" for experts over N ranks, which is `MoE.expert_group_name`; with N = 1 every rank has them all.
"""

from __future__ import annotations

from torch.distributed import ProcessGroup

from launcher.base.errors import EngineAssertionError
from launcher.comm.groups import RankGroup, world_group
from launcher.comm.mesh import build_mesh, current_mesh
from launcher.compat import ranks, ulysses
from launcher.sharding.mesh import MeshSizes


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


def _get_model_parallel_world_size() -> int:
    mesh = current_mesh()
    return 1 if mesh is None else mesh.sizes.tensor


def _get_model_parallel_rank() -> int:
    mesh = current_mesh()
    return 0 if mesh is None or mesh.tensor is None else mesh.tensor.rank


def get_tensor_model_parallel_group() -> ProcessGroup | None:
    """Return the ranks that have the same layers, each a part of them; None for a rank that has them whole."""
    mesh = current_mesh()
    return None if mesh is None or mesh.tensor is None else mesh.tensor.process_group


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first of these ranks."""
    return ranks.get_rank() - _get_model_parallel_rank()


def _get_broadcast_src_rank() -> int:
    return _get_data_parallel_group_ranks()[0]


_PREFIX = "ep_size_"


def _known(group_name: str) -> bool:
    """Whether a name is that of experts over several ranks. Raises: EngineError for one that no layer has."""
    mesh = current_mesh()
    size = 1 if mesh is None else mesh.sizes.expert
    if group_name not in ("", f"{_PREFIX}1", f"{_PREFIX}{size}"):
        raise EngineAssertionError(
            f"there is no group of experts {group_name}",
            hint=f"{_PREFIX}{size} is that of the engine that was built last: call initialize() first",
        )
    return size > 1 and group_name != f"{_PREFIX}1"


def _different(group_name: str) -> RankGroup | None:
    mesh = current_mesh()
    return mesh.expert if mesh is not None and _known(group_name) else None


def _same(group_name: str) -> RankGroup | None:
    mesh = current_mesh()
    if mesh is None:
        _known(group_name)
        return None
    return mesh.of_experts.data if _known(group_name) and mesh.of_experts is not None else mesh.data


def _get_expert_parallel_group(group_name: str = "") -> ProcessGroup | None:
    """Return the ranks that have one set of experts together; None for a rank that has all."""
    found = _different(group_name)
    return None if found is None else found.process_group


def _get_expert_parallel_world_size(group_name: str = "") -> int:
    found = _different(group_name)
    return 1 if found is None else found.world_size


def _get_expert_parallel_rank(group_name: str = "") -> int:
    found = _different(group_name)
    return 0 if found is None else found.rank


def _get_expert_parallel_group_ranks(group_name: str = "") -> list[int]:
    mesh, rank = current_mesh(), ranks.get_rank()
    if mesh is None or not _known(group_name):
        return [rank]
    return next(found for found in mesh.sizes.ranks_of_experts() if rank in found)


def _get_expert_parallel_src_rank(group_name: str = "") -> int:
    return _get_expert_parallel_group_ranks(group_name)[0]


def _get_expert_data_parallel_group(group_name: str = "") -> ProcessGroup | None:
    """Return the ranks that have the same experts; None for a rank that is alone with its own."""
    found = _same(group_name)
    return ranks.get_world_group() if found is None else found.process_group


def _get_expert_data_parallel_world_size(group_name: str = "") -> int:
    found = _same(group_name)
    return ranks.get_world_size() if found is None else found.world_size


def _get_expert_data_parallel_rank(group_name: str = "") -> int:
    found = _same(group_name)
    return ranks.get_rank() if found is None else found.rank


def _get_expert_data_parallel_group_ranks(group_name: str = "") -> list[int]:
    mesh, rank = current_mesh(), ranks.get_rank()
    if mesh is None:
        _known(group_name)
        return list(range(ranks.get_world_size()))
    groups = mesh.sizes.ranks_of_replicas() if _known(group_name) else mesh.sizes.ranks_along("data")
    return next(found for found in groups if rank in found)


def _get_expert_broadcast_src_rank(group_name: str = "") -> int:
    return _get_expert_data_parallel_group_ranks(group_name)[0]


def _get_max_expert_size() -> int:
    mesh = current_mesh()
    return 1 if mesh is None else mesh.sizes.expert


def _get_max_expert_size_name() -> str:
    return f"{_PREFIX}{_get_max_expert_size()}"


def _get_max_expert_parallel_group() -> ProcessGroup | None:
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _get_expert_parallel_group_dict() -> dict[str, ProcessGroup | None]:
    name = _get_max_expert_size_name()
    return {name: _get_expert_parallel_group(name)}


def _get_expert_data_parallel_group_dict() -> dict[str, ProcessGroup | None]:
    name = _get_max_expert_size_name()
    return {name: _get_expert_data_parallel_group(name)}


def _get_expert_model_parallel_world_size() -> int:
    return 1  # each rank has its experts whole


def _get_expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the groups of ranks with one set of experts together, and of those with the same experts.

    Raises: EngineAssertionError for sizes that do not divide the ranks, and for the order that the engine has not.
    """
    _check_order(use_data_before_expert_parallel_)
    model_size = tensor_parallel_size_ * pipeline_parallel_size_
    if world_size % (model_size * expert_parallel_size_):
        raise EngineAssertionError(
            f"{world_size} ranks cannot be divided into {expert_parallel_size_} of experts × {model_size} of a model",
            hint="use sizes whose product divides the ranks",
        )
    data = world_size // model_size
    sizes = MeshSizes(data, pipeline_parallel_size_, tensor=tensor_parallel_size_, expert=expert_parallel_size_)
    return sizes.ranks_of_experts(), sizes.ranks_of_replicas()


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False
) -> None:
    """Make the groups of experts over that many ranks, before an engine does. Every rank must call it."""
    world = world_group()
    _get_expert_parallel_ranks(world.world_size, 1, expert_parallel_size_, 1, use_data_before_expert_parallel_)
    build_mesh(world, MeshSizes(world.world_size, expert=expert_parallel_size_))


def _check_order(data_before_experts: bool) -> None:
    if data_before_experts:
        raise EngineAssertionError(
            "ranks with the same experts are not neighbours in the built-in engine",
            hint="leave use_data_before_expert_parallel_ out",
        )


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Make the groups. Every rank must call it. Raises: EngineError for a size that does not divide the ranks."""
    ulysses.SequenceGroups(sequence_parallel_size)


def get_sequence_parallel_group() -> ProcessGroup:
    """Return the ranks that have parts of this rank's sequences. Raises: EngineError where it is alone."""
    return ulysses.existing(ulysses.sequence_axis()[0])


def get_sequence_parallel_world_size() -> int:
    """Return how many these are."""
    return ulysses.sequence_axis()[1]


def get_sequence_parallel_rank() -> int:
    """Return which part of a sequence this rank has."""
    return ulysses.sequence_axis()[2]


get_sequence_data_parallel_group = ranks.get_world_group
get_sequence_data_parallel_world_size = ranks.get_world_size
get_sequence_data_parallel_rank = ranks.get_rank
