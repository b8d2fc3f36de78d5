"""The order in which this rank issues the collectives of units: one order on every rank, or the results are wrong.

At stage 3 a collective follows the model's path, which the engine cannot see before it is taken. Ranks that take
different paths exchange the wrong buffers; where these have one size no backend notices. So a digest of the order
travels with the gradient norm, and a step whose order differs between ranks is not taken.

[Note: after an exception] A script may catch what ended a pass and continue with the next batch. Ranks that all do so
have issued the same collectives, which then end as usual. A rank that does it alone has parted from the others: its
next gather would be matched with what they still wait for. So all ranks have a rendezvous before one of them continues:
through the store of the process group: a collective could be matched with another one, too.
"""

from __future__ import annotations

import datetime
import itertools
import json
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch.distributed as dist

from launcher.base.errors import EngineError
from launcher.base.timeouts import timeouts
from launcher.comm.groups import DataParallelGroup

_HINT = (
    "at stage 3 every rank must run the same modules in the same order: name the module that chooses among others in"
    ' "zero_optimization": {"leaf_module": {"classes": [...]}}, or use stage 2'
)
_ORDER_NUMBERS = itertools.count()  # alike on every rank: engines are built by all of them together


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
        self._num_steps = 0
        self._number = next(_ORDER_NUMBERS)
        self._num_rendezvous = 0
        self._parted: EngineError | None = None  # why the ranks cannot go on together

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
        self._num_steps += 1
        for kind in Collective:
            self.issued[kind].clear()
            self._digests[kind] = 0

    def rendezvous(self, group: DataParallelGroup, ended: str) -> None:
        """Wait until all ranks are about to continue after an exception that ended the same pass at the same place.

        ended: the pass, "forward" or "backward". Raises: EngineError on every rank that calls it, now and at each later
        call, where another one does not in time, or has issued other collectives.
        """
        if group.process_group is None:
            return
        if self._parted is not None:
            raise self._parted
        self._num_rendezvous += 1
        ranks = dist.get_process_group_ranks(group.process_group)  # of the world, whose store it is
        keys = [f"launch/rendezvous/{self._number}/{self._num_rendezvous}/{rank}" for rank in ranks]
        store = dist.distributed_c10d._get_default_store()
        try:
            store.set(keys[group.rank], json.dumps([ended, list(self.issued.values())]))
            store.wait(keys, datetime.timedelta(seconds=timeouts().other_ranks_s))
            reported = [json.loads(store.get(key)) for key in keys]
        except RuntimeError:  # the time is over, or the store has gone with its rank
            absent = [str(rank) for rank, key in enumerate(keys) if not _is_there(store, key)]
            who = f"rank {group.rank} caught the exception and continues, rank {', '.join(absent)} not"
            self._parted = _parted(who)
            raise self._parted from None
        if any(part != reported[0] for part in reported):
            ends = [f"{name}, after {sum(map(len, issued))} collectives" for name, issued in reported]
            self._parted = _parted("; ".join(f"rank {rank} in {end}" for rank, end in enumerate(ends)))
            raise self._parted

    def difference(self, group: DataParallelGroup) -> EngineError:
        """Return an error that names the first collective in which ranks part. Collective."""
        everywhere: list[dict[Collective, list[int]]] = [{} for _ in range(group.world_size)]
        dist.all_gather_object(everywhere, self.issued, group=group.process_group)
        kind = next(kind for kind in Collective if any(issued[kind] != self.issued[kind] for issued in everywhere))
        return self._difference(kind, {rank: issued[kind] for rank, issued in enumerate(everywhere)})

    def difference_of_waiting(self, group: DataParallelGroup) -> EngineError | None:
        """Return an error that names where this rank and another one that waits part; None where no two do.

        Not collective: it publishes what this rank has issued, and compares it with what others have published.
        """
        own = {kind: list(self.issued[kind]) for kind in Collective}
        process_group = group.process_group
        if process_group is None:
            return None
        try:
            keys = [f"launch/waiting/{self._number}/{rank}" for rank in dist.get_process_group_ranks(process_group)]
            store = dist.distributed_c10d._get_default_store()
            store.set(keys[group.rank], json.dumps([self._num_steps, list(own.values())]))
            published = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}
        except (RuntimeError, ValueError, KeyError):  # the store or the process group has gone
            return None
        for kind in Collective:
            orders = {rank: issued[kind] for rank, (step, issued) in published.items() if step == self._num_steps}
            if any(_part(own[kind], order) for order in orders.values()):
                return self._difference(kind, orders)
        return None

    def _difference(self, kind: Collective, orders: dict[int, list[int]]) -> EngineError:
        """Return an error that names the first collective in which these ranks part."""
        position = 0
        while len({tuple(order[position : position + 1]) for order in orders.values()}) == 1:
            position += 1
        ranks_of: dict[str, list[str]] = {}
        for rank, order in orders.items():
            name = self._unit_names[order[position]] if position < len(order) else None
            what = f"no further {kind.name.lower()}" if name is None else f"the {kind.name.lower()} of {name}"
            ranks_of.setdefault(what, []).append(str(rank))
        parts = "; ".join(f"{what} on rank {', '.join(ranks[:8])}" for what, ranks in ranks_of.items())
        return EngineError(f"ranks took different paths through the model since the last step: {parts}", hint=_HINT)


def _part(one: list[int], other: list[int]) -> bool:
    """Whether neither order is the beginning of the other."""
    num_both = min(len(one), len(other))
    return one[:num_both] != other[:num_both]


def _is_there(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        return False


def _parted(how: str) -> EngineError:
    return EngineError(
        f"an exception ended a pass, and not alike on every rank: {how}",
        hint="catch it on all ranks at the same place (decide together: engine.any_rank(failed)), or let the job end",
    )
