"""Where every parameter stands: parameters -> units -> shards. Pure arithmetic, no tensors.

This is the only file that knows offsets. A unit is a flat buffer: its parameters one after another in
registration order, padded with zeros so that it splits into equal chunks. Rank r owns `[r*c, (r+1)*c)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Chunks start at multiples of this, so that vector loads of every rank's shard are aligned (256 bytes in fp32).
CHUNK_ALIGNMENT_NUMEL = 64
# Neighbours are joined below this: 25 MiB in fp32, as much as DDP reduces at once. It took benchmarks/step_time.py at
# stage 0, over DDP, from 1.05 to 1.02 on the MLP (layers of 16 MiB), from 1.03 to 0.97 on the GPT (blocks of 7 MiB).
MIN_UNIT_NUMEL = 25 * 2**20 // 4
# Units whose optimizer is offloaded leave, are updated and come back one after another: smaller ones overlap better. A
# collective has a fixed cost of about 0.3 ms on gloo.
MIN_OFFLOADED_UNIT_NUMEL = 2**18


@dataclass(frozen=True)
class ParamSlot:
    """The place of one parameter in its unit."""

    index: int  # position in the unit's list of parameters
    group: int  # optimizer parameter group
    offset: int  # first element in the flat buffer
    numel: int

    @property
    def end(self) -> int:
        return self.offset + self.numel

    def within(self, owned: range) -> range:
        """Return which of the parameter's elements, from 0, are in a range of the flat buffer: perhaps none."""
        start, stop = (min(max(at, self.offset), self.end) - self.offset for at in (owned.start, owned.stop))
        return range(start, stop)


@dataclass(frozen=True)
class UnitLayout:
    """One flat buffer of `padded_numel` elements, split into `world_size` equal chunks."""

    slots: tuple[ParamSlot, ...]
    world_size: int
    padded_numel: int

    @property
    def numel(self) -> int:
        """Elements of parameters, without padding."""
        return self.slots[-1].end

    @property
    def chunk_numel(self) -> int:
        return self.padded_numel // self.world_size

    def chunk_range(self, rank: int) -> range:
        """Return the elements rank `rank` owns when the unit is sharded."""
        return range(rank * self.chunk_numel, (rank + 1) * self.chunk_numel)

    def slots_in(self, owned: range) -> list[tuple[ParamSlot, range]]:
        """Return each slot that meets `owned`, with the elements of the flat buffer they share."""
        met = []
        for slot in self.slots:
            shared = range(max(slot.offset, owned.start), min(slot.end, owned.stop))
            if shared:
                met.append((slot, shared))
        return met


def layout_unit(numels: Sequence[int], groups: Sequence[int], world_size: int) -> UnitLayout:
    """Lay parameters of the given sizes and optimizer groups out in one unit."""
    slots, offset = [], 0
    for index, (numel, group) in enumerate(zip(numels, groups, strict=True)):
        slots.append(ParamSlot(index, group, offset, numel))
        offset += numel
    step = world_size * CHUNK_ALIGNMENT_NUMEL
    return UnitLayout(tuple(slots), world_size, -(-offset // step) * step)


def min_unit_numel(*, shards_params: bool, offloads_optimizer: bool) -> int:
    """Return below how many elements neighbouring units are joined.

    Where parameters are sharded none are: small ones stay whole, and what is joined would also be gathered together.
    """
    if shards_params:
        return 0
    return MIN_OFFLOADED_UNIT_NUMEL if offloads_optimizer else MIN_UNIT_NUMEL


def join_small(numels: Sequence[int], min_numel: int, max_numel: int) -> list[range]:
    """Join neighbours: each run of them grows while it has fewer than `min_numel` elements, up to `max_numel`."""
    runs: list[range] = []
    total = 0
    for index, numel in enumerate(numels):
        if runs and total < min_numel and total + numel <= max_numel:
            runs[-1] = range(runs[-1].start, index + 1)
            total += numel
        else:
            runs.append(range(index, index + 1))
            total = numel
    return runs


def split_by_size(numels: Sequence[int], max_numel: int) -> list[range]:
    """Split a sequence of parameters into runs of at most `max_numel` elements.

    A parameter larger than `max_numel` is a run of its own.
    """
    runs, start, total = [], 0, 0
    for index, numel in enumerate(numels):
        if index > start and total + numel > max_numel:
            runs.append(range(start, index))
            start, total = index, 0
        total += numel
    if start < len(numels):
        runs.append(range(start, len(numels)))
    return runs
