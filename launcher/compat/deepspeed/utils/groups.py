"""`deepspeed.utils.groups`: all ranks are one data-parallel group; every other kind of group has one rank."""

from __future__ import annotations

from typing import NoReturn

from torch.distributed import ProcessGroup

from launcher.base.errors import EngineError
from launcher.compat import ranks


def _get_data_parallel_group() -> ProcessGroup | None:
    return ranks.get_world_group()


def _get_data_parallel_world_size() -> int:
    return ranks.get_world_size()


def _get_data_parallel_rank() -> int:
    return ranks.get_rank()


def _get_data_parallel_group_ranks() -> list[int]:
    return list(range(ranks.get_world_size()))


def _get_sequence_parallel_group() -> NoReturn:
    raise EngineError(
        "there is no group of sequence parallelism: the built-in engine has none",
        hint="remove the sequence parallel size from the settings, or install DeepSpeed",
    )


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0


def _get_model_parallel_world_size() -> int:
    return 1


def _get_model_parallel_rank() -> int:
    return 0


def _get_expert_parallel_world_size(group_name: str = "") -> int:
    return 1


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank = _get_model_parallel_rank
