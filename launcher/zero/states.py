"""The states of parameters and units, and torch's dtypes for those that a policy names."""

from __future__ import annotations

from enum import Enum, auto

import torch

from launcher.base.errors import EngineError
from launcher.config.policies import DType, Precision

TORCH_DTYPES = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}


def dtype_of(precision: Precision, param: torch.nn.Parameter) -> torch.dtype:
    """Return the dtype in which a run of this precision keeps a parameter: the run's, where it is a floating-point one.

    An fp32 run keeps frozen parameters in the dtype they have, such as a bf16 base under adapters. A 16-bit run
    casts everything, as DeepSpeed does.
    """
    keeps_own = precision.param is DType.FP32 and not param.requires_grad
    return TORCH_DTYPES[precision.param] if param.is_floating_point() and not keeps_own else param.dtype


class ParameterState(Enum):
    """Where the parameters of a unit are on this rank.

    SHARDED -> GATHERING (fetch) -> UNSHARDED (wait) -> SHARDED (release). Below stage 3 a unit is UNSHARDED, or
    GATHERING while the other ranks' updates are in flight.
    """

    SHARDED = auto()  # only this rank's chunk; the parameters are empty
    GATHERING = auto()  # the full buffer belongs to a collective
    UNSHARDED = auto()  # every element is in the buffer, the parameters are views of it


class UnitState(Enum):
    """Where a unit is within an optimizer step.

    IDLE -> ACCUMULATING (first gradient) -> REDUCING (last gradient) -> REDUCED -> IDLE (step)
    At a micro-batch that is not a boundary a full gradient stays ACCUMULATING, a sharded one becomes REDUCED and
    goes back to ACCUMULATING with the next micro-batch.
    """

    IDLE = auto()  # no gradient since the last step
    ACCUMULATING = auto()  # the local gradient buffer holds at least one micro-batch's gradient
    REDUCING = auto()  # the sum over ranks is in flight; the buffer belongs to the collective
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
