"""DeepSpeed's entry to tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.comm.groups import RankGroup, init_distributed, is_first_rank, world_group
from launcher.comm.mesh import subgroup
from launcher.config.load import load_config
from launcher.config.schema_parallel import TensorParallel
from launcher.parallel.tensor.split import split_model
from launcher.sharding.mesh import MeshSizes

_Model = TypeVar("_Model", bound=nn.Module)


def tp_model_init(
    model: _Model,
    tp_size: int = 1,
    dtype: torch.dtype | None = None,
    config: Any = None,
    plan: Mapping[str, Any] | None = None,
) -> _Model:
    """Split a model over `tp_size` neighbouring ranks, in place, and return it.

    dtype: its floating-point parameters are cast to it; None leaves them. config: a DeepSpeed config, of which
    `tensor_parallel` is read. plan: how layers are split, {pattern of names: style}. Every rank must call it.
    Raises: EngineError for a size that does not divide the ranks, and for a model that cannot be split.
    """
    init_distributed()
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if tp_size < 1 or world_size % tp_size:
        raise EngineError(
            f"tp_size {tp_size} does not divide the {world_size} ranks of this job",
            where="tp_model_init(tp_size=...)",
            hint="give a size that does",
        )
    settings = TensorParallel() if config is None else load_config(config).config.tensor_parallel
    if settings.autotp_size not in (0, tp_size):
        raise EngineError(
            f"tp_size {tp_size} is not tensor_parallel.autotp_size {settings.autotp_size} of the config",
            where="tp_model_init(tp_size=...)",
            hint="give the same size to both",
        )
    if dtype is not None:
        for param in model.parameters():
            if param.is_floating_point():
                param.data = param.data.to(dtype)
    report = split_model(model, tensor_group(tp_size), settings, plan)
    if is_first_rank():
        for notice in report.notices:
            get_logger().info("tensor parallelism: %s", notice)
    return model


def tensor_group(tp_size: int) -> RankGroup:
    """Return the group of the `tp_size` neighbouring ranks that this one belongs to. Every rank must call it."""
    world = world_group()
    if tp_size == 1 or world.process_group is None:
        return RankGroup(0, 1, None, world.runtime)
    sizes = MeshSizes(world.world_size // tp_size, tensor=tp_size)
    return world.of_ranks(subgroup(sizes.ranks_along("tensor"), "tensor"))
