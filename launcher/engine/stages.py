"""A model becomes stages of a pipeline, before anything of it is moved: each rank keeps its own layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from launcher.base.errors import EngineError
from launcher.comm.mesh import ParallelMesh
from launcher.config.schema import Config
from launcher.engine.model_check import check_model
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

        def kept(params: Any) -> list[Any]:
            given = [params] if isinstance(params, torch.Tensor) else params
            return [own[before[param]] for param in given if before.get(param) in own]

        if isinstance(optimizer, torch.optim.Optimizer):
            for group in optimizer.param_groups:
                group["params"] = kept(group["params"])
        if model_parameters is None or not any(isinstance(each, dict) for each in model_parameters):
            return None if model_parameters is None else kept(model_parameters)
        return [{**group, "params": kept(group["params"])} for group in model_parameters]


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
    profiling = Profiling(pipeline.device, on_rank_0=_measured_on_rank_0)
    own_stages, names = plan.stages_of(pipeline.rank), {param: name for name, param in model.named_parameters()}
    staged = stage_model(model, own_stages, plan.num_stages, section, sizes=mesh.sizes, profiling=profiling)
    check_model(staged)
    mark_copies(staged, pipeline.rank, plan.rank_of)
    return Staged(staged, plan, names)


def _measured_on_rank_0(measure: Callable[[], list[float]]) -> list[float]:
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
