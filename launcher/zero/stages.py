"""The ZeRO stages as a table, and the policies that the machinery is built with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch

from launcher.base.errors import EngineError


@dataclass(frozen=True)
class Stage:
    """What one stage shards over the ranks of the data-parallel group."""

    number: int
    shards_optimizer: bool  # optimizer states and fp32 master weights; gradients are reduced to their owner
    shards_gradients: bool  # each micro-batch is reduced during backward, only the owner keeps the sum
    shards_parameters: bool  # parameters rest as shards and are gathered around their use


STAGES = {
    0: Stage(0, shards_optimizer=False, shards_gradients=False, shards_parameters=False),
    1: Stage(1, shards_optimizer=True, shards_gradients=False, shards_parameters=False),
    2: Stage(2, shards_optimizer=True, shards_gradients=True, shards_parameters=False),
    3: Stage(3, shards_optimizer=True, shards_gradients=True, shards_parameters=True),
}


@dataclass(frozen=True)
class Precision:
    """Types of what is kept. Gradients are accumulated and reduced in fp32 at every precision."""

    param_dtype: torch.dtype  # of the model: float32 or bfloat16

    @property
    def has_master(self) -> bool:
        """Say whether the optimizer updates fp32 copies; in fp32 the parameters are their own master."""
        return self.param_dtype != torch.float32

    @property
    def label(self) -> str:
        """Name for the start line."""
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        return names[self.param_dtype] + (" (fp32 master)" if self.has_master else "")


@dataclass(frozen=True)
class ParameterPolicy:
    """When sharded parameters are gathered and released; counts are elements. Names follow the config's."""

    persistence_threshold: int = 0  # smaller parameters stay whole ...
    model_persistence_threshold: int = 0  # ... up to this many elements of them
    prefetch_numel: int = 0  # gathered ahead of their use
    max_live_numel: int = 0  # whole at the same time: above it nothing is fetched ahead or kept
    max_reuse_distance: int = 0  # kept when used again within so many elements
    granularity_threshold: int = 0  # modules whose parts are smaller on average are gathered as one


@dataclass(frozen=True)
class ZeroPolicy:
    """Everything that shapes the sharded machinery."""

    stage: Stage
    precision: Precision
    max_unit_numel: int  # upper bound of a unit, `reduce_bucket_size`
    overlap_comm: bool  # reduce while backward runs, gather while the next forward runs
    max_grad_norm: float  # 0: no clipping
    parameters: ParameterPolicy = ParameterPolicy()


class ParameterState(Enum):
    """Where the parameters of a unit are on this rank.

    SHARDED -> GATHERING (fetch) -> WHOLE (wait) -> SHARDED (release). Below stage 3 a unit is WHOLE, or GATHERING while
    the other ranks' updates are on their way.
    """

    SHARDED = auto()  # only this rank's chunk; the parameters are empty
    GATHERING = auto()  # the whole buffer belongs to a collective
    WHOLE = auto()  # every element stands in the buffer, the parameters are views of it


class UnitState(Enum):
    """Where a unit is within an optimizer step.

    IDLE -> ACCUMULATING (first gradient) -> REDUCING (last gradient) -> REDUCED -> IDLE (step)
    At a micro-batch that is no boundary a whole gradient stays ACCUMULATING, a sharded one becomes REDUCED and
    goes back to ACCUMULATING with the next micro-batch.
    """

    IDLE = auto()  # no gradient since the last step
    ACCUMULATING = auto()  # the local gradient buffer holds at least one micro-batch's gradient
    REDUCING = auto()  # the sum over ranks is on its way; the buffer belongs to the collective
    REDUCED = auto()  # the owned range holds the sum over ranks


TRANSITIONS = {
    UnitState.IDLE: {UnitState.ACCUMULATING},
    UnitState.ACCUMULATING: {UnitState.REDUCING, UnitState.IDLE},
    UnitState.REDUCING: {UnitState.REDUCED},
    UnitState.REDUCED: {UnitState.ACCUMULATING, UnitState.IDLE},
}


def check_transition(old: UnitState, new: UnitState) -> UnitState:
    """Return `new`. Raises: EngineError when a unit may not go there from `old`."""
    if new is not old and new not in TRANSITIONS[old]:
        raise EngineError(
            f"a ZeRO unit cannot go from {old.name} to {new.name}",
            hint="call engine(...), engine.backward(loss) and engine.step() in this order",
        )
    return new
