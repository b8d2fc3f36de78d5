"""The order in which this rank issues the collectives of units: one order on every rank, or the results are wrong.

At stage 3 a collective follows the model's path, which the engine cannot see before it is taken. Ranks that take
different paths exchange the wrong buffers; where these have one size no backend notices. So a digest of the order
travels with the gradient norm, and a step whose order differs between ranks is not taken.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import IntEnum

import torch.distributed as dist

from launcher.base.errors import EngineError
from launcher.comm.groups import DataParallelGroup

_HINT = (
    "at stage 3 every rank must run the same modules in the same order: name the module that chooses among others in"
    ' "zero_optimization": {"leaf_module": {"classes": [...]}}, or use stage 2'
)


class Collective(IntEnum):
    """What is issued for a unit."""

    GATHER = 0
    REDUCTION = 1


class CollectiveOrder:
    """What was issued since the last step: the units, by index, of each kind of collective.

    The kinds have communicators of their own: only the order within each of them matters.
    """

    def __init__(self, unit_names: Sequence[str]) -> None:
        """unit_names: for errors, by index."""
        self._unit_names = unit_names
        self.issued: dict[Collective, list[int]] = {kind: [] for kind in Collective}
        self._digests = dict.fromkeys(Collective, 0)

    @property
    def digests(self) -> list[int]:
        """32 bits for each kind."""
        return list(self._digests.values())

    def note(self, kind: Collective, unit: int) -> None:
        """Note that a collective is issued now."""
        self.issued[kind].append(unit)
        self._digests[kind] = zlib.crc32(unit.to_bytes(8, "little"), self._digests[kind])

    def begin_step(self) -> None:
        """Forget the order so far: all ranks had the same."""
        for kind in Collective:
            self.issued[kind].clear()
            self._digests[kind] = 0

    def difference(self, group: DataParallelGroup) -> EngineError:
        """Return an error that names the first collective in which ranks part. Collective."""
        everywhere: list[dict[Collective, list[int]]] = [{} for _ in range(group.world_size)]
        dist.all_gather_object(everywhere, self.issued, group=group.process_group)
        kind = next(kind for kind in Collective if any(issued[kind] != self.issued[kind] for issued in everywhere))
        orders = [issued[kind] for issued in everywhere]
        position = 0
        while len({tuple(order[position : position + 1]) for order in orders}) == 1:
            position += 1
        ranks_of: dict[str, list[str]] = {}
        for rank, order in enumerate(orders):
            name = self._unit_names[order[position]] if position < len(order) else None
            what = f"no further {kind.name.lower()}" if name is None else f"the {kind.name.lower()} of {name}"
            ranks_of.setdefault(what, []).append(str(rank))
        parts = "; ".join(f"{what} on rank {', '.join(ranks[:8])}" for what, ranks in ranks_of.items())
        return EngineError(f"ranks took different paths through the model since the last step: {parts}", hint=_HINT)
