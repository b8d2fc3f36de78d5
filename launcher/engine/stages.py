"""A model becomes stages of a pipeline, before anything of it is moved: each rank keeps its own layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from launcher.base.errors import CheckpointError, EngineError
from launcher.checkpoint.exchange import error_text
from launcher.comm.groups import RankGroup
from launcher.comm.mesh import ParallelMesh
from launcher.comm.torch_internals import tree_map_only
from launcher.config.schema import Config
from launcher.engine.model_check import check_model
from launcher.optim.factory import replace_parameters
from launcher.parallel.pipeline.divide import Profiling, stage_model
from launcher.parallel.pipeline.stages import StagedModel
from launcher.parallel.pipeline.tied import mark_copies
from launcher.sharding.pipeline import PipelinePlan


@dataclass(frozen=True)
class Staged:
    """A model whose stages the ranks of a pipeline share."""

    model: StagedModel
    plan: PipelinePlan
    names_before: Mapping[Any, str]  # of the parameters of the whole model; those of a LayerSpec had no values then

    @property
    def notices(self) -> list[str]:
        """What to say at start: the schedule, what it leaves idle, and which layers each stage has."""
        plan = self.plan
        return [
            f"pipeline: {plan.schedule}, {plan.num_stages} stages, {plan.num_micro_batches} micro-batches a step,"
            f" idle for {plan.idle_fraction:.0%} of it in theory",
            f"pipeline: {self.model.partition_text}",
        ]

    def own_parameters(self, optimizer: Any, model_parameters: list[Any] | None) -> list[Any] | None:
        """Return those of `model_parameters` that this rank has; None for all of them. Groups keep their options.

        In a torch optimizer this rank's parameters take their places, too.
        """
        own, before = dict(self.model.named_parameters()), self.names_before
        found = replace_parameters(
            optimizer, model_parameters, lambda param: [own[before[param]]] if before.get(param) in own else []
        )
        has_none = not found if found is not None else not own
        return [{"params": []}] if has_none else found  # torch's optimizers refuse no list, but an empty one


def divide_into_stages(model: nn.Module, settings: Config, mesh: ParallelMesh, num_micro_batches: int) -> Staged | None:
    """Give each rank of a pipeline its stages; None without one. Every rank must call it with the same model.

    A model that runs in stages alone is one stage then. Raises: ConfigError, EngineError for a model that cannot be
    divided.
    """
    section = settings.pipeline
    if mesh.pipeline is None and not isinstance(model, StagedModel):
        return None
    pipeline = mesh.pipeline or mesh.world.alone()
    plan = PipelinePlan(pipeline.world_size, section.virtual_stages, section.schedule, num_micro_batches)
    profiling = Profiling(pipeline.device, on_rank_0=measured_on_rank_0)
    own_stages, names = plan.stages_of(pipeline.rank), {param: name for name, param in model.named_parameters()}
    staged = stage_model(model, own_stages, plan.num_stages, section, sizes=mesh.sizes, profiling=profiling)
    check_model(staged)
    mark_copies(staged, pipeline.rank, plan.rank_of)
    return Staged(staged, plan, names)


def measured_on_rank_0(measure: Callable[[], list[float]]) -> list[float]:
    """Return what rank 0 measures, on all ranks. Collective. Raises: EngineError on all ranks where it fails."""
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = measure()
        except Exception as error:  # noqa: BLE001  # a layer's: the other ranks wait for this one
            found[1] = f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        raise EngineError(
            f"the layers could not be timed: {found[1]}",
            where="pipeline.partition",
            hint='use "parameters", or give PipelineModule an example_input that its layers take',
        )
    times: list[float] = found[0]
    return times


# ---- What the whole model has, from the stages ----


def gather(pipeline: RankGroup, value: Any) -> list[Any]:
    """Return the values of all ranks of a pipeline, in its order. Tensors must be in host memory. Collective."""
    if pipeline.process_group is None:
        return [value]
    found: list[Any] = [None] * pipeline.world_size
    dist.all_gather_object(found, value, group=pipeline.host_group)
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
        dist.gather_object(own, found, group=pipeline.host_group, group_dst=rank)
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
