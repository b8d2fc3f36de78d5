"""A model becomes stages of a pipeline, before anything of it is moved: each rank keeps its own layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from launcher.base.errors import EngineError
from launcher.comm.groups import RankGroup
from launcher.config.schema import Config
from launcher.parallel.pipeline.divide import stage_model
from launcher.parallel.pipeline.stages import StagedModel
from launcher.parallel.pipeline.tied import mark_copies
from launcher.sharding.pipeline import PipelinePlan


@dataclass(frozen=True)
class Staged:
    """A model whose stages the ranks of a pipeline share."""

    model: StagedModel
    plan: PipelinePlan

    @property
    def notices(self) -> list[str]:
        """What to say at start: the schedule, what it leaves idle, and which layers each stage has."""
        plan = self.plan
        return [
            f"pipeline: {plan.schedule}, {plan.num_stages} stages, {plan.num_micro_batches} micro-batches a step,"
            f" idle for {plan.idle_fraction:.0%} of it in theory",
            f"pipeline: {self.model.partition_text}",
        ]


def divide_into_stages(model: nn.Module, settings: Config, pipeline: RankGroup, num_micro_batches: int) -> Staged:
    """Give each rank of a pipeline its stages. Every rank must call it with the same model.

    Raises: ConfigError, EngineError for a model that cannot be divided.
    """
    section = settings.pipeline
    plan = PipelinePlan(pipeline.world_size, section.virtual_stages, section.schedule, num_micro_batches)
    staged = stage_model(model, plan.stages_of(pipeline.rank), plan.num_stages, section)
    mark_copies(staged, pipeline.rank, plan.rank_of)
    return Staged(staged, plan)


def own_parameters(model: StagedModel, optimizer: Any, model_parameters: Iterable[Any] | None) -> list[Any] | None:
    """Return those of `model_parameters` that this rank has; None for all of them. Groups keep their options.

    A torch optimizer forgets the parameters of other stages, too: this rank has freed them.
    """
    own = set(model.parameters())
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if param in own]
    if model_parameters is None:
        return None
    given = list(model_parameters)
    if not any(isinstance(each, dict) for each in given):
        return [param for param in given if param in own] or None  # of layers that were not built yet: all
    kept = [{**group, "params": [param for param in group["params"] if param in own]} for group in given]
    if own and not any(group["params"] for group in kept):
        raise EngineError(
            "none of the parameters in the given groups belongs to a layer of this rank",
            hint="build the groups after the layers: PipelineModule(..., num_stages=...) builds them in a job that"
            " has called init_distributed()",
        )
    return kept
