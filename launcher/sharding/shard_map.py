"""The map between the elements of parameters and the shards of ranks, over all units of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.sharding.layout import ParamSlot, UnitLayout


@dataclass(frozen=True)
class ShardRange:
    """Consecutive elements of what one rank holds of one unit."""

    unit: int  # index of the unit in its model
    rank: int
    offset: int  # first element, within the rank's shard of the unit
    numel: int


@dataclass(frozen=True)
class ParamRange:
    """Consecutive elements of one parameter."""

    name: str
    start: int  # first element, in the parameter's own order (row-major)
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


class ShardMap:
    """(name, range of elements) <-> (unit, rank, offset), for units laid out in this way.

    A unit that every rank holds whole is one of world size 1: its only shard is that of every rank, and is found as
    rank 0's.
    """

    def __init__(self, layouts: Sequence[UnitLayout]) -> None:
        """layouts: of all units, in the order of the model. Raises: ValueError where two parameters share a name."""
        self.layouts = tuple(layouts)
        self._slots: dict[str, tuple[int, ParamSlot]] = {}
        for unit, layout in enumerate(self.layouts):
            for slot in layout.slots:
                if slot.name in self._slots:
                    raise ValueError(f"two parameters are named {slot.name}; a map needs one name for each")
                self._slots[slot.name] = unit, slot

    def slot_of(self, name: str) -> ParamSlot:
        """Return the place of a parameter in its unit. Raises: KeyError for a name that the map does not have."""
        return self._slots[name][1]

    def shards_of(self, name: str, start: int = 0, stop: int | None = None) -> list[ShardRange]:
        """Return where the elements `[start, stop)` of a parameter are, in their order; all of it by default.

        Raises: KeyError for a name that the map does not have.
        """
        unit, slot = self._slots[name]
        first, last = slot.offset + start, slot.offset + (slot.numel if stop is None else min(stop, slot.numel))
        chunk = self.layouts[unit].chunk_numel
        found = []
        while first < last:
            rank, offset = divmod(first, chunk)
            numel = min(chunk - offset, last - first)
            found.append(ShardRange(unit, rank, offset, numel))
            first += numel
        return found

    def params_of(self, unit: int, rank: int) -> list[tuple[ParamRange, int]]:
        """Return what a rank's shard of a unit holds, each with its offset in the shard; padding is left out.

        Raises: IndexError for a rank outside of the unit's world.
        """
        layout = self.layouts[unit]
        if rank >= layout.world_size > 1:
            raise IndexError(f"unit {unit} is sharded over {layout.world_size} ranks, there is no rank {rank}")
        owned = layout.chunk_range(rank if layout.world_size > 1 else 0)
        return [
            (ParamRange(slot.name, shared.start - slot.offset, len(shared)), shared.start - owned.start)
            for slot, shared in layout.slots_in(owned)
        ]
