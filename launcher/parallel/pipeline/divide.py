"""From a model to this rank's stages of it: the one place that shows the order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from launcher.base.errors import ConfigError, EngineError
from launcher.config.schema_parallel import Pipeline
from launcher.parallel.pipeline.decoder import StagedDecoder
from launcher.parallel.pipeline.module import PipelineModule
from launcher.parallel.pipeline.stages import StagedModel
from launcher.parallel.pipeline.weights import PROFILE, WHERE, layer_weights, time_layers
from launcher.sharding.mesh import MeshSizes

Measure = Callable[[], list[float]]


@dataclass(frozen=True)
class Profiling:
    """How layers are timed for `"partition": "profile"`."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    example: Any = None  # a micro-batch (inputs, labels); None: the model's `example_input`
    # Calls a function on rank 0 alone and returns its result on all ranks; an error of it is raised on all.
    on_rank_0: Callable[[Measure], list[float]] = field(default=lambda measure: measure())


def requested_stages(model: nn.Module) -> int | None:
    """Return how many pipeline ranks a model was built for; None where it leaves that to the config."""
    return model.requested_stages if isinstance(model, PipelineModule) else None


def stage_model(
    model: nn.Module,
    own_stages: Sequence[int],
    num_stages: int,
    settings: Pipeline,
    *,
    sizes: MeshSizes | None = None,
    profiling: Profiling | None = None,
) -> StagedModel:
    """Return the stages of this rank. Every rank must call it with the same model, its own stages and the same rest.

    own_stages: `PipelinePlan.stages_of` this rank. num_stages: over all ranks, virtual ones included. sizes: of the
    mesh, which a PipelineModule may contradict. A PipelineModule is returned itself, and so is what this function
    returned before, for the same stages. Of any other model the modules of other stages are taken out.
    Raises: EngineError and ConfigError, the same on all ranks, before anything is changed.
    """
    if isinstance(model, StagedModel) and model.own_stages:
        _check_again(model, tuple(sorted(own_stages)), num_stages, settings)
    staged = _as_staged(model, settings)
    if isinstance(staged, PipelineModule) and sizes is not None:
        staged.check_mesh(sizes)
    if not staged.own_stages:
        staged.divided_by = _method(staged, settings)
        staged.prepare(num_stages, _weights(staged, profiling or Profiling()))
        staged.assign(own_stages)
    return staged


def _check_again(model: StagedModel, own_stages: tuple[int, ...], num_stages: int, settings: Pipeline) -> None:
    """Raise where a model that was divided before would have to be divided otherwise."""
    if (model.own_stages, model.num_stages) != (own_stages, num_stages):
        raise EngineError(
            f"this rank has stages {list(model.own_stages)} of {model.num_stages} of the model and nothing of the"
            f" others: it cannot become stages {list(own_stages)} of {num_stages}",
            hint="build the model anew, and load a checkpoint",
        )
    if _method(model, settings).lower() != model.divided_by.lower():
        raise ConfigError(
            f'the model was divided into stages by "{model.divided_by}" already',
            where=WHERE,
            hint="remove the key, or build the model anew with this method",
        )
    if settings.seed_layers and isinstance(model, PipelineModule) and not model.seed_layers:
        raise ConfigError(
            "the layers were built without their own seeds already",
            where="pipeline.seed_layers",
            hint="remove the key, or build the model with PipelineModule(seed_layers=True)",
        )


def _as_staged(model: nn.Module, settings: Pipeline) -> StagedModel:
    if isinstance(model, StagedDecoder):
        return model  # divided before
    if isinstance(model, PipelineModule):
        model.seed_layers = model.seed_layers or settings.seed_layers
        model.activation_checkpoint_interval = (
            settings.activation_checkpoint_interval or model.activation_checkpoint_interval
        )
        return model
    if isinstance(model, nn.Sequential):
        raise EngineError(
            "a torch.nn.Sequential has no loss, which the last stage computes",
            hint="give PipelineModule(model, loss_fn=...): it takes the layers out of a Sequential",
        )
    for name in ("seed_layers", "activation_checkpoint_interval"):
        if getattr(settings, name):
            remedy = "model.gradient_checkpointing_enable()" if name != "seed_layers" else "torch.manual_seed()"
            raise ConfigError(
                f"{name} is for a PipelineModule, and the model is a {type(model).__name__}",
                where=f"pipeline.{name}",
                hint=f"remove it, and call {remedy} before initialize()",
            )
    return StagedDecoder(model)


def _method(staged: StagedModel, settings: Pipeline) -> str:
    """Return the method of the partition: the config's, and where it says nothing that of the model."""
    if isinstance(staged, PipelineModule) and settings.partition == "best":
        return staged.partition_method
    return settings.partition


def _weights(staged: StagedModel, profiling: Profiling) -> list[float]:
    """Return what each layer counts."""
    if staged.divided_by.lower() != PROFILE:
        return layer_weights(staged.divided_by, staged.layer_facts())
    if not isinstance(staged, PipelineModule):
        raise ConfigError(
            '"profile" is for a PipelineModule: it runs one layer after the other',
            where=WHERE,
            hint='use "parameters", or "uniform" for as many blocks on each stage',
        )
    inputs = staged.example_input if profiling.example is None else profiling.example[0]
    if inputs is None:
        raise ConfigError(
            '"profile" times the layers with the inputs of a micro-batch, and there are none',
            where=WHERE,
            hint="give them as PipelineModule(example_input=...)",
        )
    return profiling.on_rank_0(lambda: time_layers(staged.layer_functions(), inputs, profiling.device))
