"""What the engine sees of a model that is divided into stages.

A model of several stages is a chain: `run_stage(0, (), batch)` returns what `run_stage(1, ..., batch)` receives, and so
on; the last stage returns the model's outputs, which `loss(outputs, batch)` makes a scalar of. A rank has some of the
stages, `own_stages`, and their parameters alone:

    staged.prepare(num_stages, weights)     # all ranks: divide the layers. Nothing is built or freed.
    staged.assign(own_stages)               # all ranks, each its own: build or keep the own layers, free the others
    received = staged(stage, received, micro_batch)     # of an own stage; the same as run_stage(), with module hooks

`parallel.pipeline.divide.stage_model` does the first two. After it:

* `named_parameters()`, `named_modules()` and `state_dict()` have the names of the whole model, for any number of
  stages. A checkpoint saved by name loads at any other number.
* `tied` lists parameters that several stages hold a copy of, by the same name. Initial values of copies are alike where
  all ranks seeded torch alike; those of the owner, the first stage, count. Gradients of copies must be summed before a
  step, where a stage that did not use its copy (no gradient) counts as zero. Where two of these stages are on one rank
  they share one parameter and one gradient.
* Stages of one rank may run in any order and interleaved, one at a time.
* A stage that is not the last returns tensors alone. Floating-point ones carry gradients backwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.base.units import counted, format_count
from launcher.parallel.pipeline.weights import LayerFacts


@dataclass(frozen=True)
class StageLayers:
    """What one stage consists of."""

    layers: range  # positions in the whole list of layers
    names: tuple[str, ...]  # of these layers
    num_params: int  # elements of its parameters; of tied ones, every stage counts its copy


class StagedModel(nn.Module, ABC):
    """A model that runs stage by stage. The module docstring has the contract; one object serves one rank."""

    num_stages: int = 0  # over all ranks: pipeline ranks × virtual stages of each; 0 before prepare()
    own_stages: tuple[int, ...] = ()  # of this rank, ascending; () before assign()
    # Canonical parameter name -> stages with a copy of it, ascending. The first is its owner: a checkpoint or a norm
    # that must count it once takes it there.
    tied: Mapping[str, tuple[int, ...]] = {}  # a constant until prepare() sets it
    whole_names: frozenset[str] = frozenset()  # of all parameters of all stages, tied ones by their canonical name
    stages: tuple[StageLayers, ...] = ()  # what each stage has
    divided_by: str = ""  # the method of the partition; "" before prepare()

    @abstractmethod
    def layer_facts(self) -> list[LayerFacts]:
        """Return what a partition goes by, of each layer of the whole model."""

    @abstractmethod
    def prepare(self, num_stages: int, weights: Sequence[float]) -> None:
        """Divide the layers into stages of about the same weight each; nothing is built or freed.

        All ranks must do the same. weights: of the layers. Raises: ConfigError for fewer layers than stages,
        EngineError for layers that cannot be apart.
        """

    @abstractmethod
    def assign(self, own_stages: Sequence[int]) -> None:
        """Keep the layers of these stages, build those that are not built yet, and free the others. Once.

        Each rank calls it with its own stages, after all ranks have divided the model alike. Parameters are on the
        device where they were, or the CPU. Initial values depend on the layer, not on the number of stages.
        Raises: EngineError.
        """

    @abstractmethod
    def needs_batch(self, stage: int) -> bool:
        """Whether `run_stage` of this stage reads the micro-batch. `loss` reads it in any case."""

    @abstractmethod
    def run_stage(self, stage: int, received: tuple[Tensor, ...], micro_batch: Any) -> Any:
        """Run the forward of one own stage.

        received: what the stage before returned; () for the first. micro_batch: may be None where `needs_batch` says
        no. Returns a tuple of tensors for the next stage; the last stage returns the model's outputs, any pytree.
        Raises: EngineError for a stage of another rank, a micro-batch of the wrong form, or layers that return
        something else than tensors in front of another stage.
        """

    @abstractmethod
    def loss(self, outputs: Any, micro_batch: Any) -> Tensor:
        """Return the scalar loss of what the last stage returned, before any division by accumulation.

        Raises: EngineError where there is none.
        """

    def forward(self, stage: int, received: tuple[Tensor, ...], micro_batch: Any = None) -> Any:
        """Do what `run_stage` does, so that hooks on this module run."""
        return self.run_stage(stage, received, micro_batch)

    @property
    def partition_text(self) -> str:
        """Which layers each stage has, and how many parameters: for the start line."""
        return "; ".join(
            f"stage {index}: {_shown(stage.names)}, {format_count(stage.num_params)} parameters"
            for index, stage in enumerate(self.stages)
        )

    def check_own(self, own_stages: Sequence[int]) -> tuple[int, ...]:
        """Return the stages of a rank in order. Raises: EngineError for numbers that are not stages, or a second call.

        For implementations of `assign`.
        """
        own = tuple(sorted(set(own_stages)))
        if not self.stages:
            raise EngineError("the model has not been divided into stages yet", hint="call stage_model()")
        if self.own_stages:
            raise EngineError(f"stages {list(self.own_stages)} are this rank's already", hint="divide a new model")
        if not own or own[0] < 0 or own[-1] >= self.num_stages:
            raise EngineError(f"{list(own_stages)} are not stages of a model with {counted(self.num_stages, 'stage')}")
        return own

    def check_is_own(self, stage: int) -> None:
        """Raise EngineError for a stage of another rank. For implementations of `run_stage`."""
        if stage not in self.own_stages:
            raise EngineError(f"stage {stage} is not one of this rank's, {list(self.own_stages)}")


def find_tied(names_of_stages: Sequence[Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several stages hold, from the canonical names of each stage's parameters."""
    holders: dict[str, list[int]] = {}
    for stage, names in enumerate(names_of_stages):
        for name in dict.fromkeys(names):
            holders.setdefault(name, []).append(stage)
    return {name: tuple(stages) for name, stages in holders.items() if len(stages) > 1}


def _shown(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]} ({len(names)} layers)"
