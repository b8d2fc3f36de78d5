"""Wholes of parameters of which ranks have parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from launcher.comm.groups import RankGroup
from launcher.parallel.tensor import functions
from launcher.zero.splits import split_of


@torch.no_grad()
def full_values(param: nn.Parameter, group: RankGroup) -> Tensor:
    """Return all of a parameter of which each rank of the group holds a part; of another one, its own values.

    The parameter must be unsharded. Every rank of the group must call it.
    """
    split = split_of(param)
    if split is None:
        return param.detach()
    return functions.gathered(param.detach().to(group.device), group, split.blocks, split.dim)
