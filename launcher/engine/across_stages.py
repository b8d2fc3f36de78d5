"""What a whole model has, from the stages of a pipeline: state dicts, names, buffers. It travels between hosts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from launcher.base.errors import CheckpointError
from launcher.checkpoint.exchange import error_text
from launcher.comm.groups import RankGroup


def gather(pipeline: RankGroup, value: Any) -> list[Any]:
    """Return the values of all ranks of a pipeline, in its order. Tensors must be in host memory. Collective."""
    if pipeline.process_group is None:
        return [value]
    found: list[Any] = [None] * pipeline.world_size
    dist.all_gather_object(found, value, group=_hosts(pipeline))
    return found


def joined_state(pipeline: RankGroup, own: Mapping[str, Any], *, is_wanted: bool) -> dict[str, Any]:
    """Return the state dicts of all stages as one where it is wanted, else nothing. Collective.

    own: of this rank's stages, in host memory. Of a parameter that several stages have the first one's copy is taken.
    """
    if pipeline.process_group is None:
        return dict(own) if is_wanted else {}
    joined: dict[str, Any] = {}
    for rank, wants in enumerate(gather(pipeline, is_wanted)):
        if not wants:
            continue
        found: list[Any] | None = [None] * pipeline.world_size if rank == pipeline.rank else None
        dist.gather_object(own, found, group=_hosts(pipeline), group_dst=rank)
        for state in found or ():
            for key, value in state.items():
                joined.setdefault(key, value)
    return joined


def joined_mappings(pipeline: RankGroup | None, *own: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each of several mappings as one of all stages; as it is without a pipeline. Collective."""
    if pipeline is None:
        return [dict(each) for each in own]
    stages = gather(pipeline, [_in_host_memory(each) for each in own])
    joined: list[dict[str, Any]] = [{} for _ in own]
    for stage in stages:
        for mapping, of_stage in zip(joined, stage, strict=True):
            for key, value in of_stage.items():
                mapping.setdefault(key, value)
    return joined


def names_of_others(pipeline: RankGroup | None, model: nn.Module) -> frozenset[str]:
    """Return the names of parameters and buffers that only other stages have. Collective."""
    if pipeline is None:
        return frozenset()
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)} | dict(model.named_buffers()).keys()
    return frozenset(name for names in gather(pipeline, own) for name in names) - own


def check_all(pipeline: RankGroup | None, error: Exception | None) -> None:
    """Raise CheckpointError on all ranks of a pipeline where one of them met an error. Collective."""
    if pipeline is None:
        if error is not None:
            raise error
        return
    said = [text for text in gather(pipeline, None if error is None else error_text(error)) if text]
    if said:
        raise CheckpointError("; ".join(said)) from error


def _in_host_memory(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = tree_map_only(Tensor, Tensor.cpu, dict(values))  # in extra state, tensors may be inside
    return found


def _hosts(pipeline: RankGroup) -> dist.ProcessGroup | None:
    return pipeline.host_process_group or pipeline.process_group
