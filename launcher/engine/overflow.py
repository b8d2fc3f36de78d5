"""Why the gradients of a step are not finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from launcher.comm import collectives
from launcher.comm.groups import RankGroup
from launcher.zero.step import first_bad_gradient
from launcher.zero.unit import FlatUnit


def reason(units: list[FlatUnit], group: RankGroup, losses: list[Tensor], norm: float) -> str:
    """Name the ranks whose loss is not finite, or else the parameter whose gradient is not. Every rank must call it.

    losses: of this rank's micro-batches since the last step, as far as the engine has seen any; norm: of all gradients.
    """
    mean = torch.stack([loss.float() for loss in losses]).mean().item() if losses else 0.0
    by_rank = collectives.gather_scalars(group, mean)
    bad = [f"{loss} on rank {rank}" for rank, loss in enumerate(by_rank) if not math.isfinite(loss)]
    if bad:
        return f"the loss is {', '.join(bad[:8])}"
    first = first_bad_gradient(units, group)
    return f"the gradient norm is {norm}" + (f", first in {first}" if first else "")
