"""Shards for tests of optimizers: one parameter of which this rank owns all, or several in the memory of one unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from launcher.optim.api import ParamShard


def full_shard(
    master: Tensor, *, name: str = "weight", group: int = 0, unit: int = 0, param: Tensor | None = None
) -> ParamShard:
    """Return the shard of a parameter of one dimension with a gradient of zeros."""
    numel = master.numel()
    return ParamShard(
        name, torch.Size([numel]), range(numel), master, torch.zeros_like(master), group, unit=unit, param=param
    )


def shards_of_unit(values: Sequence[Tensor], owned: range, unit: int = 0) -> list[ParamShard]:
    """Return what a rank with `owned` has of parameters `values` (1-D), which are called p0, p1, ..."""
    flat = torch.cat([value.reshape(-1) for value in values])[owned.start : owned.stop].clone()
    grad = torch.zeros_like(flat)
    shards: list[ParamShard] = []
    total = sum(value.numel() for value in values)
    others = (range(owned.start), range(owned.stop, total))
    chunks = (owned, *(chunk for chunk in others if chunk))
    offset = start = 0
    for number, value in enumerate(values):
        first, stop = (min(max(at - offset, 0), value.numel()) for at in (owned.start, owned.stop))
        place = slice(start, start + stop - first)
        shard = ParamShard(f"p{number}", value.shape, range(first, stop), flat[place], grad[place], 0, unit, start)
        shards.append(replace(shard, offset=offset, chunks=chunks))
        offset, start = offset + value.numel(), place.stop
    return shards
