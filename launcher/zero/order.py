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
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch.distributed as dist

from launcher.base.errors import EngineError
from launcher.base.timeouts import timeouts
from launcher.comm import pending
from launcher.comm.groups import RankGroup
from launcher.comm.torch_internals import default_store

HINT = (
    "at stage 3 every rank must run the same modules in the same order, in evaluation too: name the module that chooses"
    ' among others in "zero_optimization": {"leaf_module": {"classes": [...]}}, or use stage 2'
)
# What forwards without gradients need, which no step follows.
EVALUATION_HINT = (
    "at stage 3 all ranks run the same forwards: pass synced_gpus=True to generate(), whose texts end at different"
    " lengths, and give every rank as many batches to evaluate"
)
_ORDER_NUMBERS = itertools.count()  # alike on every rank: engines are built by all of them together
# Collectives of a kind that are kept by name: no step comes in a process that only evaluates or generates.
_MAX_ISSUED = 20_000


class Collective(IntEnum):
    """What is issued for a unit."""

    GATHER = 0
    REDUCTION = 1


# How many collectives are forgotten, and the units of those after them.
_Order = tuple[int, list[int]]


class CollectiveOrder:
    """What was issued since the last step: the units, by index, of each kind of collective.

    Where the kinds have communicators of their own, only the order within each of them matters. Where they share one,
    so does the order among them.
    """

    def __init__(self, unit_names: Sequence[str], *, shares_group: bool = False) -> None:
        """unit_names: for errors, by index. shares_group: gathers and reductions have one communicator."""
        self._unit_names = unit_names
        self.issued: dict[Collective, list[int]] = {kind: [] for kind in Collective}
        self._num_forgotten = dict.fromkeys(Collective, 0)  # that were issued before those in `issued`
        self.is_evaluation = False  # the pass under way is a forward without gradients
        self._digests = dict.fromkeys(Collective, 0)
        self._shares_group = shares_group
        self._digest_of_kinds = 0  # of the order among them
        self._num_steps = 0
        self.number = next(_ORDER_NUMBERS)
        self._num_rendezvous = 0
        self._parted: EngineError | None = None  # why the ranks cannot continue together

    @property
    def digests(self) -> list[int]:
        """32 bits for each kind, and for the order among them."""
        return [*self._digests.values(), self._digest_of_kinds]

    def note(self, kind: Collective, unit: int) -> None:
        """Note that a collective is issued next."""
        pending.name_next(f"the {kind.name.lower()} of {self._unit_names[unit]}")
        issued = self.issued[kind]
        issued.append(unit)
        if len(issued) > _MAX_ISSUED:
            del issued[: _MAX_ISSUED // 2]
            self._num_forgotten[kind] += _MAX_ISSUED // 2
        self._digests[kind] = zlib.crc32(unit.to_bytes(8, "little"), self._digests[kind])
        if self._shares_group:
            self._digest_of_kinds = zlib.crc32(bytes([kind]), self._digest_of_kinds)

    def begin_step(self) -> None:
        """Forget the order so far: all ranks had the same."""
        self._num_steps += 1
        for kind in Collective:
            self.issued[kind].clear()
            self._num_forgotten[kind] = 0
            self._digests[kind] = 0
        self._digest_of_kinds = 0

    def rendezvous(self, group: RankGroup, ended: str) -> None:
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
        keys = [f"launch/rendezvous/{self.number}/{self._num_rendezvous}/{rank}" for rank in ranks]
        store = default_store()
        try:
            store.set(keys[group.rank], json.dumps([ended, self._orders()]))
            store.wait(keys, datetime.timedelta(seconds=timeouts().other_ranks_s))
            reported = [json.loads(store.get(key)) for key in keys]
        except RuntimeError:  # the time is over, or the store has gone with its rank
            absent = [str(rank) for rank, key in enumerate(keys) if not _is_there(store, key)]
            who = f"rank {group.rank} caught the exception and continues, rank {', '.join(absent)} not"
            self._parted = _parted(who)
            raise self._parted from None
        # All ranks have read what was set for the rendezvous before this one: they have come to this one.
        store.delete_key(f"launch/rendezvous/{self.number}/{self._num_rendezvous - 1}/{ranks[group.rank]}")
        if any(part != reported[0] for part in reported):
            ends = [f"{name}, after {sum(map(_end, orders))} collectives" for name, orders in reported]
            self._parted = _parted("; ".join(f"rank {rank} in {end}" for rank, end in enumerate(ends)))
            raise self._parted

    def difference(self, group: RankGroup) -> EngineError:
        """Return an error that names the first collective in which ranks part. Collective."""
        own = self._orders()
        everywhere = group.communicator.gather_objects(own)
        kind = next((kind for kind in Collective if any(orders[kind] != own[kind] for orders in everywhere)), None)
        if kind is None:  # where they part is forgotten
            return EngineError("ranks took different paths through the model since the last step", hint=HINT)
        return self._difference(kind, {rank: orders[kind] for rank, orders in enumerate(everywhere)})

    def difference_among(self, published: Mapping[int, Sequence[_Order]]) -> EngineError | None:
        """Return an error that names where orders part, None where each is the beginning of another one.

        published: the orders of some ranks since the same step.
        """
        for kind in Collective:
            orders = {rank: everywhere[kind] for rank, everywhere in published.items()}
            first = next(iter(orders.values()), None)
            if first is not None and any(_part(first, order) for order in orders.values()):
                return self._difference(kind, orders)
        return None

    def published(self, most: int) -> list[Any]:
        """Return the steps so far, and the last `most` collectives of each kind since then."""
        orders = [
            (end - len(units), units) for end, units in ((_end(each), each[1][-most:]) for each in self._orders())
        ]
        return [self._num_steps, orders]

    def _orders(self) -> list[_Order]:
        """Return for each kind the number of collectives that are forgotten, and those after them."""
        return [(self._num_forgotten[kind], list(self.issued[kind])) for kind in Collective]

    def _difference(self, kind: Collective, orders: dict[int, _Order]) -> EngineError:
        """Return an error that names the first collective in which these ranks part."""
        position = max(num_forgotten for num_forgotten, _ in orders.values())
        last = max(map(_end, orders.values()))
        while position < last and len({_at(order, position) for order in orders.values()}) == 1:
            position += 1
        ranks_of: dict[str, list[str]] = {}
        for rank, order in orders.items():
            unit = _at(order, position)
            what = f"no further {kind.name.lower()}"
            if unit is not None:
                what = f"the {kind.name.lower()} of {self._unit_names[unit]}"
            ranks_of.setdefault(what, []).append(str(rank))
        parts = "; ".join(f"{what} on rank {', '.join(ranks[:8])}" for what, ranks in ranks_of.items())
        return EngineError(f"ranks took different paths through the model since the last step: {parts}", hint=HINT)


def _end(order: _Order) -> int:
    return order[0] + len(order[1])


def _at(order: _Order, position: int) -> int | None:
    """Return the unit of a collective by its position since the last step; None after the last one."""
    index = position - order[0]
    return order[1][index] if index < len(order[1]) else None


def _part(one: _Order, other: _Order) -> bool:
    """Whether neither order is the beginning of the other, as far as both are known."""
    start, end = max(one[0], other[0]), min(_end(one), _end(other))
    return (
        one[1][max(0, start - one[0]) : max(0, end - one[0])]
        != other[1][max(0, start - other[0]) : max(0, end - other[0])]
    )


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
