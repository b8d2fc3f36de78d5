"""Where every parameter's elements live: parameter -> unit -> shard ranges. Pure arithmetic.

The only file that knows offsets. A unit packs its parameters without gaps and is padded at its end
to `world_size * ALIGNMENT_NUMEL` elements; rank r owns elements [r*c, (r+1)*c) with c = shard_numel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT_NUMEL = 32  # a shard starts on a 64-byte line in 16-bit and on a 128-byte line in fp32


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as the layout sees it; `block`, `dtype` and `group` only need to compare."""

    name: str
    numel: int
    dtype: str
    block: str  # parameters of one block stay together while the size bound allows
    group: int = 0  # index of its optimizer group


@dataclass(frozen=True)
class ParamSlot:
    """A parameter's place in its unit: elements [start, stop)."""

    spec: ParamSpec
    start: int
    stop: int


@dataclass(frozen=True)
class ShardRange:
    """The part of one parameter that a rank owns."""

    slot: ParamSlot
    param_start: int  # first owned element, counted in the parameter
    shard_start: int  # the same element, counted in the shard
    numel: int


@dataclass(frozen=True)
class UnitLayout:
    """Parameters that communicate together in one contiguous buffer."""

    slots: tuple[ParamSlot, ...]
    world_size: int
    shard_numel: int

    @property
    def padded_numel(self) -> int:
        """Return the buffer's elements, padding included."""
        return self.shard_numel * self.world_size

    def shard_ranges(self, rank: int) -> tuple[ShardRange, ...]:
        """Return what `rank` owns, in buffer order; padding belongs to no parameter."""
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        ranges = []
        for slot in self.slots:
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop:
                ranges.append(ShardRange(slot, start - slot.start, start - low, stop - start))
        return tuple(ranges)


def plan_units(specs: Sequence[ParamSpec], world_size: int, bound_numel: int) -> tuple[UnitLayout, ...]:
    """Split parameters into units: one dtype each, whole blocks up to `bound_numel` elements.

    A new unit starts when the next block would pass the bound; a larger block is split between
    parameters, and a parameter larger than the bound is a unit of its own. Tied weights are given once.

    Raises:
        ValueError: a bound or world size below 1, or a name given twice.
    """
    if world_size < 1 or bound_numel < 1:
        raise ValueError(f"world_size and bound_numel must be at least 1, got {world_size}, {bound_numel}")
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("a parameter is listed twice; give tied weights once")
    units: list[UnitLayout] = []
    for dtype in dict.fromkeys(spec.dtype for spec in specs):
        blocks: dict[str, list[ParamSpec]] = {}
        for spec in specs:
            if spec.dtype == dtype:
                blocks.setdefault(spec.block, []).append(spec)
        current: list[ParamSpec] = []
        for block in blocks.values():
            whole = sum(spec.numel for spec in block) <= bound_numel
            for piece in [block] if whole else [[spec] for spec in block]:
                if current and sum(spec.numel for spec in [*current, *piece]) > bound_numel:
                    units.append(_pack(current, world_size))
                    current = []
                current.extend(piece)
        units.append(_pack(current, world_size))
    return tuple(units)


def _pack(specs: Sequence[ParamSpec], world_size: int) -> UnitLayout:
    slots, end = [], 0
    for spec in specs:
        slots.append(ParamSlot(spec, end, end + spec.numel))
        end += spec.numel
    chunk = world_size * ALIGNMENT_NUMEL
    return UnitLayout(tuple(slots), world_size, max(1, -(-end // chunk)) * ALIGNMENT_NUMEL)
