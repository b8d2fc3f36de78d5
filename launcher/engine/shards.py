"""From units to the shards an optimizer updates, and from its states back to the units."""

from __future__ import annotations

from launcher.optim.api import FlatOptimizer, FlatShard, StateRun
from launcher.zero.unit import FlatUnit


def owned_shards(units: list[FlatUnit], *, whole_parameters: bool) -> list[FlatShard]:
    """Return this rank's shards: runs of equal optimizer group, or each parameter in its own shape.

    whole_parameters: for optimizers that look at shapes; every unit must be owned whole (stage 0).
    """
    shards = []
    for unit in units:
        if unit.grads is None:
            continue
        master, grad = unit.params.master, unit.grads.owned_grad
        if whole_parameters:
            for slot, owned in unit.layout.slots_in(unit.owned):
                shape = unit.members.params[slot.index].shape
                whole = slice(owned.start, owned.stop)
                shards.append(
                    FlatShard(master[whole].view(shape), grad[whole].view(shape), slot.group, unit.index, owned.start)
                )
            continue
        for segment in unit.layout.segments_in(unit.owned):
            place = slice(segment.start, segment.start + segment.numel)
            shards.append(FlatShard(master[place], grad[place], segment.group, unit.index, segment.start))
    return shards


def let_units_find_states(units: list[FlatUnit], shards: list[FlatShard], optimizer: FlatOptimizer) -> None:
    """Have each unit reach the optimizer states of its owned range."""
    numbers: dict[int, list[int]] = {}
    for number, shard in enumerate(shards):
        numbers.setdefault(shard.unit, []).append(number)

    def runs_of(unit: FlatUnit) -> list[StateRun]:
        return [
            StateRun(shards[number].start + run.start, shards[number].start + run.stop, run.state)
            for number in numbers.get(unit.index, ())
            for run in optimizer.states(number)
        ]

    for unit in units:
        unit.find_states = runs_of
