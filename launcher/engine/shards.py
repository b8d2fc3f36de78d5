"""From units to the shards an optimizer updates."""

from __future__ import annotations

from launcher.optim.api import FlatShard
from launcher.zero.unit import FlatUnit


def owned_shards(units: list[FlatUnit], *, whole_parameters: bool) -> list[FlatShard]:
    """Return this rank's shards: runs of equal optimizer group, or each parameter in its own shape.

    whole_parameters: for optimizers that look at shapes; every unit must be owned whole (stage 0).
    """
    shards = []
    for number, unit in enumerate(units):
        if whole_parameters:
            for slot, owned in unit.layout.slots_in(unit.owned):
                shape = unit.members.params[slot.index].shape
                place = slice(owned.start, owned.stop)
                master, grad = (flat[place].view(shape) for flat in (unit.master, unit.owned_grad))
                shards.append(FlatShard(master, grad, slot.group, number, owned.start))
            continue
        for segment in unit.layout.segments_in(unit.owned):
            place = slice(segment.start, segment.start + segment.numel)
            shards.append(FlatShard(unit.master[place], unit.owned_grad[place], segment.group, number, segment.start))
    return shards
