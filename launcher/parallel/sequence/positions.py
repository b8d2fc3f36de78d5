"""Positions of a rank's tokens within whole sequences, and whether they are known without asking the other ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# On a tensor: rank, number of ranks, and its version then, which a change in place raises.
_MADE_FOR = "_launch_made_for"


def made_positions(tokens: Tensor, rank: int, num_ranks: int) -> Tensor:
    """Return the positions of a rank's part, counted from the begin of the whole sequence: int64 [batch, length].

    tokens: [batch, length, ...], of the part.
    """
    size, length = tokens.shape[:2]
    places = torch.arange(rank * length, (rank + 1) * length, device=tokens.device)
    positions = places.expand(size, -1).contiguous()
    if not positions.is_inference():  # those have no version
        setattr(positions, _MADE_FOR, (rank, num_ranks, positions._version))
    return positions


def are_made_positions(positions: Any, rank: int, num_ranks: int) -> bool:
    """Whether this is what `made_positions` has returned for a rank, unchanged. A copy, as of another device, is not.

    Ranks that treat their parts alike all get the same answer.
    """
    made_for = getattr(positions, _MADE_FOR, None)
    return made_for is not None and made_for == (rank, num_ranks, positions._version)
