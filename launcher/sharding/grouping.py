"""Which parameters form a unit: by what must stay together, and by size."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

# Neighbours are joined below this: 25 MiB in fp32, as much as DDP reduces at once. It took benchmarks/step_time.py at
# stage 0, over DDP, from 1.05 to 1.02 on the MLP (layers of 16 MiB), from 1.03 to 0.97 on the GPT (blocks of 7 MiB).
MIN_UNIT_NUMEL = 25 * 2**20 // 4
# Units whose optimizer is offloaded leave, are updated and come back one after another: smaller ones overlap better. A
# collective has a fixed cost of about 0.3 ms on gloo.
MIN_OFFLOADED_UNIT_NUMEL = 2**18
# The first number in a dotted name is the position in a list of modules: that of a block.
_BLOCK = re.compile(r"^((?:[^.]+\.)*?\d+)\.")


def block_of(name: str) -> str:
    """Return the name of the block a parameter belongs to, such as `model.layers.3`; empty beside the blocks."""
    block = _BLOCK.match(name)
    return block[1] if block else ""


def form_units(
    numels: Sequence[int],
    keys: Sequence[Hashable],
    kinds: Sequence[Hashable] | None = None,
    *,
    min_numel: int,
    max_numel: int,
) -> list[list[int]]:
    """Divide parameters, given by size in registration order, into units; return the indices of each unit's.

    keys: parameters of one key stay together, as far as `max_numel` allows, and form one unit where the first of them
    stands. Neighbouring units below `min_numel` are joined, whatever their keys. kinds: parameters of different kinds
    are in no unit together, and those of one kind are neighbours whatever is between them; None: all are of one kind.
    """
    by_kind: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds or [None] * len(numels)):
        by_kind.setdefault(kind, []).append(index)
    units = [
        [of_kind[place] for place in unit]
        for of_kind in by_kind.values()
        for unit in _units_of_kind(
            [numels[index] for index in of_kind], [keys[index] for index in of_kind], min_numel, max_numel
        )
    ]
    return sorted(units, key=lambda unit: unit[0]) if len(by_kind) > 1 else units


def _units_of_kind(numels: list[int], keys: list[Hashable], min_numel: int, max_numel: int) -> list[list[int]]:
    together: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        together.setdefault(key, []).append(index)
    found = list(together.values())
    joined = join_small([sum(numels[index] for index in unit) for unit in found], min_numel, max_numel)
    units = []
    for part in joined:
        unit = [index for one in found[part.start : part.stop] for index in one]
        cuts = split_by_size([numels[index] for index in unit], max_numel)
        units += [unit[cut.start : cut.stop] for cut in cuts]
    return units


def min_unit_numel(*, shards_params: bool, offloads_optimizer: bool) -> int:
    """Return below how many elements neighbouring units are joined.

    Where parameters are sharded none are: joined units would also be gathered together.
    """
    if shards_params:
        return 0
    return MIN_OFFLOADED_UNIT_NUMEL if offloads_optimizer else MIN_UNIT_NUMEL


def choose_small(numels: Sequence[int], threshold_numel: int, total_numel: int) -> set[int]:
    """Return the indices of parameters below a size, in order, as long as they have at most `total_numel` together."""
    chosen, total = set(), 0
    for index, numel in enumerate(numels):
        if numel < threshold_numel and total + numel <= total_numel:
            chosen.add(index)
            total += numel
    return chosen


def join_small(numels: Sequence[int], min_numel: int, max_numel: int) -> list[range]:
    """Join neighbours: each range of them grows while it has fewer than `min_numel` elements, up to `max_numel`."""
    joined: list[range] = []
    total = 0
    for index, numel in enumerate(numels):
        if joined and total < min_numel and total + numel <= max_numel:
            joined[-1] = range(joined[-1].start, index + 1)
            total += numel
        else:
            joined.append(range(index, index + 1))
            total = numel
    return joined


def split_by_size(numels: Sequence[int], max_numel: int) -> list[range]:
    """Split a sequence of parameters into ranges of at most `max_numel` elements.

    A parameter larger than `max_numel` is a range of its own.
    """
    cuts, start, total = [], 0, 0
    for index, numel in enumerate(numels):
        if index > start and total + numel > max_numel:
            cuts.append(range(start, index))
            start, total = index, 0
        total += numel
    if start < len(numels):
        cuts.append(range(start, len(numels)))
    return cuts
