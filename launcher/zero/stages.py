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
    shards_parameters: bool  # parameters are kept as shards and are gathered around their use


STAGES = {
    0: Stage(0, shards_optimizer=False, shards_gradients=False, shards_parameters=False),
    1: Stage(1, shards_optimizer=True, shards_gradients=False, shards_parameters=False),
    2: Stage(2, shards_optimizer=True, shards_gradients=True, shards_parameters=False),
    3: Stage(3, shards_optimizer=True, shards_gradients=True, shards_parameters=True),
}


DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Precision:
    """Types of what is computed, kept and sent. Sums over ranks: see `collectives.reduce_scatter`."""

    param_dtype: torch.dtype  # of the model
    keeps_fp32_master: bool = True  # of a 16-bit model
    grad_dtype: torch.dtype = torch.float32  # of sums over micro-batches
    wire_dtype: torch.dtype | None = None  # of gradients on their way; None: 16 bits where that rounds nothing
    autocast_dtype: torch.dtype | None = None  # of what the forward computes under torch.autocast
    has_16bit_states: bool = False  # optimizer states are as the 16-bit master

    @property
    def has_master(self) -> bool:
        """Say whether the optimizer updates fp32 copies; in fp32 the parameters are their own master."""
        return self.param_dtype != torch.float32 and self.keeps_fp32_master

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type in which the forward computes."""
        return self.autocast_dtype or self.param_dtype

    @property
    def label(self) -> str:
        """Name for the start line."""
        name = DTYPE_NAMES[self.param_dtype]
        if self.autocast_dtype is not None:
            return f"{name} (autocast {DTYPE_NAMES[self.autocast_dtype]})"
        if self.param_dtype == torch.float32:
            return name
        return f"{name} (fp32 master)" if self.keeps_fp32_master else f"{name} (no fp32 master)"


@dataclass(frozen=True)
class Reduction:
    """How gradients of ranks become one."""

    is_mean: bool = True  # else their sum
    predivide: float = 1.0  # they are divided by this before they are sent, the rest of the mean after the sum
    scatters: bool = True  # each rank gets its part of the sum only; else every rank the whole
    at_step_only: bool = False  # `engine.step()` alone decides where accumulation ends

    def factor(self, world_size: int) -> float:
        """Return what the sum over ranks is multiplied by in all."""
        return 1.0 / world_size if self.is_mean else 1.0


@dataclass(frozen=True)
class ParameterPolicy:
    """When sharded parameters are gathered and released; counts are elements. Names follow the config's."""

    persistence_threshold: int = 0  # smaller parameters stay whole ...
    model_persistence_threshold: int = 0  # ... up to this many elements of them
    prefetch_numel: int = 0  # gathered ahead of their use
    max_live_numel: int = 0  # whole at the same time: above it nothing is fetched ahead or kept
    max_reuse_distance: int = 0  # kept when used again within so many elements
    num_read_ahead: int = 0  # shards read from disk before they are fetched
    granularity_threshold: int = 0  # modules whose parts are smaller on average are gathered as one


class Place(Enum):
    """Where something is kept between its uses."""

    DEVICE = "none"  # the values are those of the config's `device` keys
    HOST = "cpu"
    DISK = "nvme"


@dataclass(frozen=True)
class OffloadPolicy:
    """What leaves the device between its uses."""

    optimizer: Place = Place.DEVICE  # masters, states and gradients, which are updated where they rest
    params: Place = Place.DEVICE  # the shards of stage 3
    optimizer_ratio: float = 1.0  # part of the elements whose optimizer goes away
    pins_optimizer: bool = True  # page-locked host memory
    pins_params: bool = True
    cores_fraction: float = 1.0  # of the threads that update in host memory
    is_delayed: bool = False  # the update runs beside the next forward and backward ...
    num_steps_in_order: int = 0  # ... after so many that do not
    reads_ahead: bool = False  # of the disk: the next unit's states while one is updated
    resident_states: frozenset[str] = frozenset()  # names of optimizer states that stay in memory beside the disk
    max_host_params: int = 0  # elements of shards that are kept in host memory beside the disk

    @property
    def is_any(self) -> bool:
        """Say whether anything is offloaded."""
        return self.optimizer is not Place.DEVICE or self.params is not Place.DEVICE

    @property
    def label(self) -> str:
        """What goes where, for the start line."""
        part = f"{self.optimizer_ratio:.0%} of the optimizer" if self.optimizer_ratio < 1 else "optimizer"
        places = {part: self.optimizer, "parameters": self.params}
        said = [f"{what} → {place.value}" for what, place in places.items() if place is not Place.DEVICE]
        if self.is_delayed:
            said.append(f"updates one step late, from step {self.num_steps_in_order + 1} on")
        return " · ".join(said)


@dataclass(frozen=True)
class ZeroPolicy:
    """Everything that shapes the sharded machinery."""

    stage: Stage
    precision: Precision
    max_unit_numel: int  # upper bound of a unit, `reduce_bucket_size`
    overlap_comm: bool  # reduce while backward runs, gather while the next forward runs
    max_grad_norm: float  # 0: no clipping
    parameters: ParameterPolicy = ParameterPolicy()
    reduction: Reduction = Reduction()
    offload: OffloadPolicy = OffloadPolicy()
    skips_overflow: bool = True  # a step whose gradients are not finite
    accepts_unused: bool = True  # parameters that no rank used; else they are an error
    warns_of_new_paths: bool = False  # say when the model used its modules in another order than before


class ParameterState(Enum):
    """Where the parameters of a unit are on this rank.

    SHARDED -> GATHERING (fetch) -> WHOLE (wait) -> SHARDED (release). Below stage 3 a unit is WHOLE, or GATHERING while
    the other ranks' updates are on their way.
    """

    SHARDED = auto()  # only this rank's chunk; the parameters are empty
    GATHERING = auto()  # the whole buffer belongs to a collective
    WHOLE = auto()  # every element is in the buffer, the parameters are views of it


class UnitState(Enum):
    """Where a unit is within an optimizer step.

    IDLE -> ACCUMULATING (first gradient) -> REDUCING (last gradient) -> REDUCED -> IDLE (step)
    At a micro-batch that is not a boundary a whole gradient stays ACCUMULATING, a sharded one becomes REDUCED and
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
