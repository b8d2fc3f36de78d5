"""The layout of a unit: parameters one after another in a flat buffer that splits into one chunk a rank.

Parameters stand in registration order; zeros pad the buffer so that chunks are equal. Rank r owns `[r*c, (r+1)*c)`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from launcher.sharding.tensors import ParamInfo

# Chunks start at multiples of this, so that vector loads of every rank's shard are aligned (256 bytes in fp32).
CHUNK_ALIGNMENT_NUMEL = 64


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
