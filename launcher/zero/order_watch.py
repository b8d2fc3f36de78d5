"""Ends a job whose ranks wait for each other, and says on every one of them where they part.

[Note: ranks that wait for each other] A rank that skips a block at stage 3, or evaluates alone, issues other
collectives than its peers. gloo matches messages by their tags, and messages of different sizes have different ones
here (see `GlooCommunicator`); a gather and a reduction have groups of their own. So the ranks wait for each other,
where a backend would otherwise mix up their buffers or end the processes without a word about the model. Nothing ends
such a wait from outside, and the thread that trains is in it. So a thread of its own publishes, through the store of
the default group, what this rank waits for and how many collectives of each kind and group it has begun.

[Note: what proves a deadlock] Ranks of a group begin their collectives in one order, and a collective ends on no rank
before all ranks have begun it. So rank A is held by rank B where A waits for a collective that B has not begun. Where
ranks that all wait are held by each other in a circle, none of them can ever begin what another one waits for. The same
holds where their orders differ as far as both go. A rank that is ahead, or one that reads data, evaluates more batches
or saves, is held by ranks that do not wait: this is no circle, however long it lasts.

On a device that works behind the host, the host waits for other hosts alone. There a rank is also held by its device
where a collective was begun long ago that another rank has not begun. Hosts that exchange what they know of a step,
of which one has begun more than the other before that, have parted whatever they wait for: see `launcher.comm.hosts`.

A wait in the script's own collective, such as `dist.barrier`, is seen on the stack; for which ranks is not known. It
counts as a wait for all others where every rank of the job has waited three times as long.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.base.timeouts import timeouts
from launcher.comm import pending
from launcher.comm.groups import RankGroup
from launcher.comm.hosts import HOST_EXCHANGE
from launcher.comm.torch_internals import default_store
from launcher.zero.order import EVALUATION_HINT, HINT, CollectiveOrder

_INTERVAL_S = 1.0
_EXIT_CODE = 1
_LONGER = 3.0  # times `order_check_s`, where it is not known which ranks are waited for
_LAST_WORDS = datetime.timedelta(seconds=5)
_MAX_ORDER = 2_000  # collectives of each kind that are published
_VERDICT = "launch/parted"
_HINT_OF_CALLS = "every rank must call backward(), step() and collectives of the script equally often, in one order"
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")


@dataclass(frozen=True)
class Report:
    """What a rank publishes that has made no progress for a while."""

    tick: int  # grows with each report: a later one of the same wait proves that it lasts
    since_s: float  # by the rank's own clock: equal for reports of the same wait
    lasts_s: float
    what: str  # is waited for
    is_host: bool  # the host waits; else its device may
    needs: dict[str, int]  # calls that others must begin, by group and kind: their number; empty: it is not known
    ranks: dict[str, list[int]]  # the ranks of the world that take part in these
    issued: dict[str, int]  # how many calls this rank has begun
    orders: dict[str, Any]  # by the number of an engine: its step, and the orders since

    def is_held_by(self, rank: int, other: Report) -> bool:
        """Whether another rank has not begun what this one waits for."""
        return any(
            rank in self.ranks[name] and other.issued.get(name, 0) < number for name, number in self.needs.items()
        )


def held_by_each_other(reports: Mapping[int, Report], world_size: int, check_s: float) -> set[int]:
    """Return the ranks of which each is held by another one of them; see the note. Empty where nothing is proven."""
    is_everybody = len(reports) == world_size and all(each.lasts_s >= _LONGER * check_s for each in reports.values())
    held = set(reports)

    def is_held(rank: int) -> bool:
        own = reports[rank]
        if not own.needs:
            return is_everybody and len(held) > 1
        return any(own.is_held_by(other, reports[other]) for other in held if other != rank)

    while free := {rank for rank in held if not is_held(rank)}:
        held -= free
    # Devices alone prove nothing: their hosts may be about to begin what is missing.
    has_proof = any(reports[rank].is_host for rank in held) and any(reports[rank].needs for rank in held)
    return held if has_proof else set()


def stuck_exchanges(reports: Mapping[int, Report], limit_s: float) -> dict[int, str]:
    """Return, by rank, the calls in which all hosts of one group have waited for each other longer than `limit_s`.

    They exchange a few bytes: these do not arrive only where the ranks are in different calls, or groups have crossed.
    """
    for own in reports.values():
        for name in own.needs:
            members = [reports[rank] for rank in own.ranks[name] if rank in reports]
            all_wait = len(members) == len(own.ranks[name]) and all(
                name in each.needs and each.is_host and each.lasts_s >= limit_s for each in members
            )
            if name.endswith(f"/{HOST_EXCHANGE}") and all_wait:
                return {rank: f"{reports[rank].what} in call {reports[rank].needs[name]}" for rank in own.ranks[name]}
    return {}


class OrderWatch(threading.Thread):
    """Watches what this process waits for as long as an engine of it lives. One for a default process group."""

    def __init__(self, world: dist.ProcessGroup, *, is_async_device: bool) -> None:
        super().__init__(name="launch-order-watch", daemon=True)
        self.world = weakref.ref(world)
        self.orders: weakref.WeakSet[CollectiveOrder] = weakref.WeakSet()
        self._is_async_device = is_async_device
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._store = default_store()
        self._tick = 0
        self._is_published = False
        self._previous: dict[int, Report] = {}
        self._script: tuple[tuple[int, int], float, str] | None = None  # which frame, since when, what it is in
        self._warned_since_s: float | None = None
        self._verdict_lock = threading.Lock()  # never released by the thread that ends the process
        pending.on_failed_wait(self._before_error_of_backend)

    def run(self) -> None:
        """Look at waits until no engine or no default group is left; see the module."""
        interval = threading.Event()
        while not interval.wait(_INTERVAL_S) and self._is_needed():
            try:
                self._look()
            except RuntimeError:  # the store has gone with its rank: nothing can be told any more
                self.orders.clear()

    def _is_needed(self) -> bool:
        with _lock:
            if self.orders and self.world() is dist.group.WORLD:
                return True
            _watches[:] = [each for each in _watches if each is not self]
            if not _watches:  # else the store, and its port, would outlive the group
                pending.on_failed_wait(None)
            return False

    def _look(self) -> None:
        check_s = timeouts().order_check_s
        own = self._report(check_s)
        if own is None or own.lasts_s < min(_INTERVAL_S, check_s):
            if self._is_published:
                self._store.set(_key(self._rank), "null")
                self._is_published = False
            return
        self._end_if_parted()
        if own.lasts_s < check_s:
            return
        self._tick += 1
        self._store.set(_key(self._rank), json.dumps(asdict(own)))
        self._is_published = True
        if any(self._read(rank) is not None for rank in range(self._rank)):
            return  # the first rank that waits compares: at many ranks each would read what all have published
        reports = {self._rank: own}
        for rank in range(self._rank + 1, self._world_size):
            report = self._read(rank)
            if report is not None:
                reports[rank] = report
        lasting = {
            rank: report
            for rank, report in reports.items()
            if rank in self._previous
            and self._previous[rank].since_s == report.since_s
            and self._previous[rank].tick < report.tick
        }
        self._previous = reports
        error = self._error_of(lasting, check_s)
        if error is not None:
            self._store.set(_VERDICT, json.dumps([str(error), list(reports)]))
            self._end_if_parted()
        if lasting:
            self._warn(own, reports)

    def _read(self, rank: int) -> Report | None:
        key = _key(rank)
        found = json.loads(self._store.get(key)) if self._store.check([key]) else None
        return None if found is None else Report(**found)

    # ---- what this rank waits for ----

    def _report(self, check_s: float) -> Report | None:
        now_s, wait, calls = time.monotonic(), pending.waiting(), pending.issued_calls()
        if wait is not None:
            needs, since_s, is_host = [] if wait.call is None else [wait.call], wait.since_s, True
            what = f"a {wait.kind or 'transfer'}" if wait.call is None else wait.call.what
            numbers = {call.calls.name: call.number for call in needs}
        elif (script := self._wait_of_script(now_s)) is not None:
            (_, since_s, what), numbers, is_host = script, {}, True
        elif self._is_async_device and calls:
            last = max(calls.values(), key=lambda each: each.begun_s)
            since_s, what, is_host = last.begun_s, f"its device, after {last.what}", False
            numbers = {name: each.number for name, each in calls.items() if now_s - each.begun_s >= check_s}
            if not numbers:
                return None
        else:
            return None
        return Report(
            self._tick,
            since_s,
            now_s - since_s,
            what,
            is_host,
            numbers,
            {name: calls[name].ranks for name in numbers},
            {name: each.number for name, each in calls.items()},
            {str(order.number): order.published(_MAX_ORDER) for order in list(self.orders)},
        )

    def _wait_of_script(self, now_s: float) -> tuple[tuple[int, int], float, str] | None:
        """Return since when the training thread has been in one call of torch.distributed, and in which."""
        inner = sys._current_frames().get(pending.issuing_thread())
        if inner is None or not inner.f_code.co_filename.endswith(_C10D):
            self._script = None
            return None
        which = (id(inner), inner.f_lasti)
        if self._script is None or self._script[0] != which:
            name, caller = inner.f_code.co_name, inner.f_back
            while caller is not None and _is_of_torch(caller):
                name = caller.f_code.co_name if caller.f_code.co_filename.endswith(_C10D) else name
                caller = caller.f_back
            where = "" if caller is None else f" at {caller.f_code.co_filename}:{caller.f_lineno}"
            self._script = (which, now_s, f"torch.distributed.{name}{where}")
        return self._script

    # ---- what follows ----

    def _error_of(self, reports: Mapping[int, Report], check_s: float) -> EngineError | None:
        for order in list(self.orders):
            published = {rank: report.orders.get(str(order.number)) for rank, report in reports.items()}
            own = published.get(self._rank)
            same_step = {rank: each[1] for rank, each in published.items() if each and own and each[0] == own[0]}
            error = order.difference_among(same_step) if any(each.is_host for each in reports.values()) else None
            if error is not None:
                return error
        held = {rank: reports[rank].what for rank in held_by_each_other(reports, self._world_size, check_s)}
        held = held or stuck_exchanges(reports, timeouts().host_exchange_s)
        if not held:
            return None
        ranks_of: dict[str, list[str]] = {}
        for rank, what in sorted(held.items()):
            ranks_of.setdefault(what, []).append(str(rank))
        parts = "; ".join(f"rank {', '.join(ranks[:8])} for {what}" for what, ranks in ranks_of.items())
        return EngineError(
            f"ranks took different paths through the model since the last step, and wait for each other: {parts}",
            hint=HINT if any("the gather of" in what for what in ranks_of) else _HINT_OF_CALLS,
        )

    def _warn(self, own: Report, reports: Mapping[int, Report]) -> None:
        """Say once for each wait which ranks a forward without gradients waits for."""
        if self._warned_since_s == own.since_s or not any(order.is_evaluation for order in self.orders):
            return
        absent = [
            str(rank)
            for rank in sorted({rank for ranks in own.ranks.values() for rank in ranks} - {self._rank})
            if rank not in reports or own.is_held_by(rank, reports[rank])
        ]
        if absent:
            self._warned_since_s = own.since_s
            others = ", ".join(absent[:8])
            get_logger().warning(
                "rank %d waits for rank %s in a forward without gradients: %s", self._rank, others, EVALUATION_HINT
            )

    def _before_error_of_backend(self) -> None:
        """End the process if ranks have parted: peers may have ended before this one, whose wait has therefore failed.

        The backend's error, which says nothing of the model, is then not to reach the script.
        """
        thread = threading.Thread(target=self._end_if_parted, daemon=True)  # a store may be out of reach for minutes
        with contextlib.suppress(RuntimeError):  # the interpreter is ending
            thread.start()
            thread.join(2 * _LAST_WORDS.total_seconds())

    def _end_if_parted(self) -> None:
        """End the process where ranks are known to wait for each other."""
        with self._verdict_lock, contextlib.suppress(RuntimeError):  # the store has gone with its rank
            if self._store.check([_VERDICT]):
                self._end_process()

    def _end_process(self) -> None:
        """Say what holds the ranks, and end the process when all that wait have said it."""
        text, ranks = json.loads(self._store.get(_VERDICT))
        get_logger().error("%s", text)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Where the script waits itself, in torch.distributed, the error of a peer that has ended is not to follow.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"{_VERDICT}/{self._rank}", "")
            self._store.wait([f"{_VERDICT}/{rank}" for rank in ranks], _LAST_WORDS)
        os._exit(_EXIT_CODE)  # an exception would end this thread only


def _key(rank: int) -> str:
    return f"launch/waiting/{rank}"


def _is_of_torch(frame: FrameType) -> bool:
    return os.path.join("torch", "distributed") in frame.f_code.co_filename


_watches: list[OrderWatch] = []  # that runs
_lock = threading.Lock()


def watch_order(order: CollectiveOrder, group: RankGroup) -> None:
    """Watch the collectives of one engine until `unwatch_order`, or until the order is collected.

    group: the ranks of the engine; a rank alone waits for nothing.
    """
    world = dist.group.WORLD if group.process_group is not None else None
    if world is None:
        return
    with _lock:
        if not _watches or _watches[0].world() is not world:
            _watches[:] = [OrderWatch(world, is_async_device=group.runtime.is_async_device)]
            _watches[0].start()
        _watches[0].orders.add(order)


def unwatch_order(order: CollectiveOrder) -> None:
    """Watch an engine no more; what waits in it is then the backend's to end."""
    with _lock:
        for watch in _watches:
            watch.orders.discard(order)
