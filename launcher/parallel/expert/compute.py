"""The experts of a rank, run on the tokens that came to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def run_each(experts: Sequence[nn.Module], rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Run each expert on its rows, which may be none. rows: [n, width], those of the first expert first -> the same.

    sizes: how many rows each expert has. Every expert runs: one that no token has reached gets a gradient of zero then,
    as all ranks with a copy of it do.
    """
    parts = rows.split(list(sizes))
    return torch.cat([output_of(module, part) for module, part in zip(experts, parts, strict=True)])


def output_of(expert: nn.Module, rows: Tensor) -> Tensor:
    """Return the output of an expert; the first one where it returns several, such as a bias besides."""
    output = expert(rows)
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first
