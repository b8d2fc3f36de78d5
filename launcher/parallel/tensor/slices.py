"""Parts of parameters, and wholes of parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from launcher.comm.groups import RankGroup
from launcher.parallel.tensor import functions
from launcher.sharding.tensors import TensorSplit
from launcher.zero.parameters import split_of


def slice_of(full: Tensor, split: TensorSplit) -> Tensor:
    """Return the part of a full tensor that this rank holds, in memory of its own."""
    parts = [full.narrow(split.dim, start, stop - start) for start, stop in split.pieces()]
    return torch.cat(parts, split.dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def full_values(param: nn.Parameter, group: RankGroup) -> Tensor:
    """Return all of a parameter of which each rank of the group holds a part; of another one, its own values.

    The parameter must be unsharded. Every rank of the group must call it.
    """
    split = split_of(param)
    if split is None:
        return param.detach()
    return functions.gathered(param.detach().to(group.device), group, split.blocks, split.dim)
