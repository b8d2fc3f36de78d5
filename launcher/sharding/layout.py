"""The layout of a unit: parameters one after another in a flat buffer that splits into one chunk a rank.

Parameters stand in registration order; zeros pad the buffer so that chunks are equal. Rank r owns `[r*c, (r+1)*c)`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

# ---- What is known of a parameter without its tensor ----


@dataclass(frozen=True)
class TensorSplit:
    """Which part of a parameter the ranks of a tensor- or expert-parallel group hold: the same share of every block.

    A plain parameter is one block, and so are experts that are stacked along dimension 0. A fused one has several along
    `dim`, such as query, key and value of one projection: a rank holds its share of each, one after another.
    """

    shape: tuple[int, ...]  # of the full parameter
    dim: int  # not negative
    index: int  # of this rank in its group
    count: int  # ranks of the group
    blocks: tuple[int, ...]  # sizes along `dim`; each is a multiple of `count`, their sum is shape[dim]

    @property
    def local_numel(self) -> int:
        """Elements that one rank holds."""
        return math.prod(self.local_shape)

    @property
    def is_known(self) -> bool:
        """Whether the numbers fit together: they may come from a file."""
        sizes = (*self.shape, self.dim, self.index, self.count, *self.blocks)
        if not all(type(size) is int and size >= 0 for size in sizes) or not 0 <= self.dim < len(self.shape):
            return False
        is_divided = self.count > 0 and all(block % self.count == 0 for block in self.blocks)
        return is_divided and sum(self.blocks) == self.shape[self.dim] and self.index < self.count

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what one rank holds."""
        return (*self.shape[: self.dim], self.shape[self.dim] // self.count, *self.shape[self.dim + 1 :])

    @property
    def is_in_order(self) -> bool:
        """Whether the parts one after another are the whole, element by element: rows of a matrix, or experts."""
        return self.dim == 0 and len(self.blocks) == 1

    def pieces(self, index: int | None = None) -> list[tuple[int, int]]:
        """Return what a rank holds as (start, stop) along `dim` of the full parameter; None: this rank."""
        found, start = [], 0
        index = self.index if index is None else index
        for block in self.blocks:
            share = block // self.count
            found.append((start + index * share, start + (index + 1) * share))
            start += block
        return found


@dataclass(frozen=True)
class ParamInfo:
    """One parameter of a model; tied ones have one name, the first."""

    name: str  # fully qualified; empty for one that is not part of a model yet
    shape: tuple[int, ...]  # of the full parameter, whatever of it a rank holds; with `split` of this rank's part
    dtype: str  # of the values the forward reads, as torch prints it without "torch.": "bfloat16"
    is_trainable: bool = True
    group: int = 0  # optimizer parameter group, where it is trainable
    split: TensorSplit | None = None  # over tensor- or expert-parallel ranks; None: each of them has all of it

    @cached_property
    def numel(self) -> int:
        """Elements of the parameter; 1 for a scalar."""
        return math.prod(self.shape)


# ---- The layout of a unit ----


# Chunks start at multiples of this, so that vector loads of every rank's shard are aligned (256 bytes in fp32).
CHUNK_ALIGNMENT_NUMEL = 64


def unsharded_shape(param: Any) -> tuple[int, ...]:
    """Return the shape of a parameter, also of one that is sharded and has no elements of its own now."""
    return tuple(getattr(param, "ds_shape", param.shape))


def unsharded_numel(param: Any) -> int:
    """Return the elements of a parameter, also of one that is sharded."""
    return math.prod(unsharded_shape(param))


@dataclass(frozen=True)
class ParamSlot:
    """The place of one parameter in its unit."""

    index: int  # position in the unit's list of parameters
    offset: int  # first element in the flat buffer
    param: ParamInfo

    @property
    def name(self) -> str:
        return self.param.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.param.shape

    @property
    def group(self) -> int:
        return self.param.group

    @property
    def numel(self) -> int:
        return self.param.numel

    @property
    def first_element(self) -> int:
        """The first element in the order in which parts of a split parameter follow each other."""
        split = self.param.split
        return 0 if split is None else split.index * split.local_numel

    @property
    def end(self) -> int:
        return self.offset + self.numel

    def within(self, owned: range) -> range:
        """Return the elements of the parameter, counted from its own first, that a range of the unit holds."""
        start, stop = (min(max(place, self.offset), self.end) - self.offset for place in (owned.start, owned.stop))
        return range(start, stop)


@dataclass(frozen=True)
class UnitLayout:
    """One flat buffer of `padded_numel` elements, split into `world_size` equal chunks."""

    slots: tuple[ParamSlot, ...]
    world_size: int
    padded_numel: int
    first_rank: int = 0  # that has chunk 0, where other ranks have other parts of the model
    rank_step: int = 1  # from the rank with one chunk to that with the next; of experts the ranks between have others

    @property
    def numel(self) -> int:
        """Elements of parameters, without padding."""
        return self.slots[-1].end

    @property
    def is_one_even_param(self) -> bool:
        """Whether it is one parameter in chunks of `ceil(numel / world_size)`: no alignment has made them longer."""
        return len(self.slots) == 1 and self.chunk_numel == -(-self.numel // self.world_size)

    @property
    def chunk_numel(self) -> int:
        return self.padded_numel // self.world_size

    @property
    def is_trainable(self) -> bool:
        """Whether the unit's parameters are trained; either all of them are or none."""
        return self.slots[0].param.is_trainable

    @cached_property
    def names(self) -> list[str]:
        """Fully qualified names of the parameters, by slot."""
        return [slot.name for slot in self.slots]

    @cached_property
    def _offsets(self) -> list[int]:
        return [slot.offset for slot in self.slots]

    def rank_of(self, chunk: int) -> int:
        """Return the rank that has a chunk, counted over all parts of the model."""
        return self.first_rank + chunk * self.rank_step

    def chunk_of(self, rank: int) -> int:
        """Return the chunk of a rank that is counted over all parts of the model. It must have one."""
        return (rank - self.first_rank) // self.rank_step

    def chunk_range(self, rank: int) -> range:
        """Return the elements rank `rank` owns when the unit is sharded."""
        return range(rank * self.chunk_numel, (rank + 1) * self.chunk_numel)

    def slots_in(self, owned: range) -> list[tuple[ParamSlot, range]]:
        """Return each slot that meets `owned`, with the elements of the flat buffer they share."""
        met = []
        for index in range(max(bisect_right(self._offsets, owned.start) - 1, 0), len(self.slots)):
            slot = self.slots[index]
            if slot.offset >= owned.stop:
                break
            shared = range(max(slot.offset, owned.start), min(slot.end, owned.stop))
            if shared:
                met.append((slot, shared))
        return met


def layout_unit(
    params: Sequence[ParamInfo], world_size: int, num_copies: int = 1, *, alignment_numel: int = CHUNK_ALIGNMENT_NUMEL
) -> UnitLayout:
    """Lay parameters out in one unit, of which each of `world_size` ranks may own one chunk.

    num_copies: of the shards, which are averaged with each other: each chunk splits into so many equal parts.
    alignment_numel: chunks are multiples of so many elements.
    """
    offsets = list(accumulate((param.numel for param in params), initial=0))
    slots = tuple(ParamSlot(index, offsets[index], param) for index, param in enumerate(params))
    step = world_size * math.lcm(alignment_numel, num_copies)
    return UnitLayout(slots, world_size, -(-offsets[-1] // step) * step)


# ---- All units of a model ----


@dataclass(frozen=True)
class ShardRange:
    """Consecutive elements of what one rank holds of one unit."""

    unit: int  # index of the unit in its model
    rank: int
    offset: int  # first element, within the rank's shard of the unit
    numel: int


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
