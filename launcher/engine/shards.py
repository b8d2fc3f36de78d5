"""From units to the shards an optimizer updates, and from its states back to the units."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch

from launcher.optim.api import FlatOptimizer, FlatShard, StateRun, Whole, by_unit
from launcher.sharding.layout import ParamSlot
from launcher.zero.unit import FlatUnit


def owned_shards(units: list[FlatUnit], *, whole_parameters: bool, by_parameter: bool = False) -> list[FlatShard]:
    """Return this rank's shards: runs of equal optimizer group, or parameter by parameter.

    whole_parameters: each in its own shape, for optimizers that look at shapes; every unit must be owned whole
    (stage 0). by_parameter: flat, what this rank owns of each, perhaps nothing; every rank gets equally many.
    """
    shards = []
    for unit in units:
        if unit.grads is None:
            continue
        if whole_parameters:
            for slot, owned in unit.layout.slots_in(unit.owned):
                shape = torch.Size(slot.shape)
                shards.append(_shard(unit, slot.group, owned.start, len(owned), shape))
            continue
        segments = unit.layout.parts_in(unit.owned) if by_parameter else unit.layout.segments_in(unit.owned)
        wholes = [_whole(unit, slot) for slot in unit.layout.slots] if by_parameter else [None] * len(segments)
        with unit.swap.with_memory() if unit.swap is not None else contextlib.nullcontext():
            for segment, whole in zip(segments, wholes, strict=True):
                shard = _shard(unit, segment.group, segment.start, segment.numel)
                shards.append(replace(shard, whole=whole))
    return shards


def _whole(unit: FlatUnit, slot: ParamSlot) -> Whole:
    layout, is_split = unit.layout, len(unit.owned) < unit.layout.padded_numel
    owned = [layout.chunk_range(rank) if is_split else unit.owned for rank in range(layout.world_size)]
    return Whole(torch.Size(slot.shape), tuple(slot.within(part) for part in owned))


def _shard(unit: FlatUnit, group: int, start: int, numel: int, shape: torch.Size | None = None) -> FlatShard:
    assert unit.grads is not None
    place = slice(start, start + numel)
    params = unit.params
    kept = [params.master[place], unit.grads.home_grad[place]]
    if params.copy is not None:
        kept.append(params.copy[place])
    master, grad, *copy = kept if shape is None else [tensor.view(shape) for tensor in kept]
    return FlatShard(master, grad, group, unit.index, start, copy[0] if copy else None)


def reserve_states(units: list[FlatUnit], shards: list[FlatShard], optimizer: FlatOptimizer) -> None:
    """Take room on disk for the states to come. Raises: EngineError when there is not enough."""
    for number, shard in enumerate(shards):
        swap = units[shard.unit].swap
        if swap is not None:
            sizes_bytes = optimizer.sizes_of_states(number)
            swap.reserve(sizes_bytes[name] for name in sizes_bytes if name not in units[shard.unit].resident_states)


def let_units_find_states(units: list[FlatUnit], shards: list[FlatShard], optimizer: FlatOptimizer) -> None:
    """Have each unit reach the optimizer states of its owned range."""
    numbers = by_unit(shards)

    def runs_of(unit: FlatUnit) -> list[StateRun]:
        return [
            StateRun(shards[number].start + run.start, shards[number].start + run.stop, run.state)
            for number in numbers.get(unit.index, ())
            for run in optimizer.states(number)
        ]

    for unit in units:
        unit.find_states = runs_of
