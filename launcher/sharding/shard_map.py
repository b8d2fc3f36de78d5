"""The map between the elements of parameters and the shards of ranks, over all units of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    start: int  # first element, row-major; of a parameter in parts (`TensorSplit`) part after part, each row-major
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


class ShardMap:
    """(name, range of elements) <-> (unit, rank, offset), for units laid out in this way.

    A unit that every rank holds whole is one of world size 1: its only shard is that of every rank, and is found as
    that of its first rank. Ranks may have other parts of the model, with units of their own (`UnitLayout.first_rank`).
    A parameter, or part of one, that several of them have is found at the first.
    """

    def __init__(self, layouts: Sequence[UnitLayout]) -> None:
        """layouts: of all units, in the order of the model. Raises: ValueError where two parameters share a name."""
        self.layouts = tuple(layouts)
        self._slots: dict[str, list[tuple[int, ParamSlot]]] = {}  # of each parameter its parts, in their order
        for unit, layout in enumerate(self.layouts):
            for slot in layout.slots:
                self._add(unit, slot)
        for name, parts in self._slots.items():
            split = parts[0][1].param.split
            if split is not None and [slot.param.split for _, slot in parts] != [
                replace(split, index=index) for index in range(split.count)
            ]:
                raise ValueError(f"the parts of {name} are not all there")

    def _add(self, unit: int, slot: ParamSlot) -> None:
        parts = self._slots.setdefault(slot.name, [])
        same = next((found for found, part in parts if part.param.split == slot.param.split), None)
        if same is None:
            parts.append((unit, slot))
        elif self.layouts[unit].first_rank == self.layouts[same].first_rank:
            raise ValueError(f"two parameters are named {slot.name}; a map needs one name for each")

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def slot_of(self, name: str, unit: int | None = None) -> ParamSlot:
        """Return the place of a parameter in its unit, of a part of it in `unit`. Raises: KeyError without one."""
        for found, slot in self._slots[name]:
            if unit in (None, found):
                return slot
        raise KeyError(name)

    def shards_of(self, name: str, start: int = 0, stop: int | None = None) -> list[ShardRange]:
        """Return where the elements `[start, stop)` of a parameter are, in their order; all of it by default.

        Raises: KeyError for a name that the map does not have.
        """
        found = []
        for unit, slot in self._slots[name]:
            before = slot.first_element
            first = slot.offset + max(start - before, 0)
            last = slot.offset + (slot.numel if stop is None else min(stop - before, slot.numel))
            layout = self.layouts[unit]
            while first < last:
                chunk, offset = divmod(first, layout.chunk_numel)
                numel = min(layout.chunk_numel - offset, last - first)
                found.append(ShardRange(unit, layout.rank_of(chunk), offset, numel))
                first += numel
        return found

    def params_of(self, unit: int, rank: int) -> list[tuple[ParamRange, int]]:
        """Return what a rank's shard of a unit holds, each with its offset in the shard; padding is left out.

        Raises: IndexError for a rank outside of the unit's world.
        """
        layout = self.layouts[unit]
        chunk = layout.chunk_of(rank) if layout.world_size > 1 else 0
        if not 0 <= chunk < layout.world_size or (layout.world_size > 1 and layout.rank_of(chunk) != rank):
            raise IndexError(f"unit {unit} is sharded over {layout.world_size} ranks, there is no rank {rank}")
        owned = layout.chunk_range(chunk)
        return [
            (
                ParamRange(slot.name, slot.first_element + shared.start - slot.offset, len(shared)),
                shared.start - owned.start,
            )
            for slot, shared in layout.slots_in(owned)
        ]
