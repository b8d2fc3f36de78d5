"""Collectives in flight, and by number what each group of ranks has begun: see `launcher.zero.order_watch`."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist

from launcher.comm import observe


class Call(NamedTuple):
    """One collective of a process group."""

    calls: Calls  # those of its kind in the group
    number: int  # its place among these, from 1 on: ranks of a group begin them in one order
    what: str  # for messages


@dataclass
class Calls:
    """What this process has begun of one kind of collective in one process group."""

    name: str  # of the group and the kind, alike on every rank
    ranks: list[int]  # of the world, that belong to the group
    number: int = 0  # how many so far
    begun_s: float = 0.0  # when the last one was begun (`time.monotonic`)
    what: str = ""  # the last one is, for messages


class Wait(NamedTuple):
    """The host waits for other ranks."""

    since_s: float  # `time.monotonic`
    call: Call | None  # None: for a transfer between two ranks, or a later phase of a collective
    kind: str


class _Issued:
    """The collectives that this process has begun since its default group was made."""

    def __init__(self) -> None:
        self.world: weakref.ref[dist.ProcessGroup] | None = None
        self.calls: dict[str, Calls] = {}  # by name
        self.current: Call | None = None  # which is being begun: what is put in flight belongs to it
        self.next_name = ""
        self.thread_id = 0  # of the thread that has begun the last one
        self.end_if_parted: Callable[[], None] | None = None  # called where a wait fails


_issued = _Issued()


def name_next(what: str) -> None:
    """Say for messages what the collective is that is begun next."""
    _issued.next_name = what


def begin_call(kind: str, process_group: dist.ProcessGroup) -> Call:
    """Count a collective that is about to be begun. Every rank of the group must call it in the same order."""
    world = dist.group.WORLD
    if world is not None and (_issued.world is None or _issued.world() is not world):
        _issued.world = weakref.ref(world)
        _issued.calls.clear()
    name = f"{process_group.group_name}/{kind}"
    calls = _issued.calls.get(name)
    if calls is None:
        calls = _issued.calls[name] = Calls(name, dist.get_process_group_ranks(process_group))
    calls.number += 1
    calls.begun_s = time.monotonic()
    calls.what = _issued.next_name or f"the {kind} of {_purpose(process_group)}"
    _issued.current, _issued.next_name = Call(calls, calls.number, calls.what), ""
    _issued.thread_id = threading.get_ident()
    return _issued.current


def _purpose(process_group: dist.ProcessGroup) -> str:
    return "all ranks" if process_group is dist.group.WORLD else str(process_group.group_desc)


def end_call() -> None:
    """The collective is in flight."""
    _issued.current = None


def current_call() -> Call | None:
    """Return the collective that is being begun."""
    return _issued.current


def issued_calls() -> dict[str, Calls]:
    """Return what was begun, by names that are alike on every rank."""
    return dict(_issued.calls)


def issuing_thread() -> int:
    """Return which thread begins collectives."""
    return _issued.thread_id


@dataclass(eq=False)
class Pending:
    """A collective in flight. Buffers must not be touched before `wait()`, which is idempotent.

    A collective may have phases: what `finish` returns is the next one, in flight.
    """

    works: list[dist.Work] = field(default_factory=list)
    finish: Callable[[], Pending | None] | None = None  # local work left after the last byte has arrived
    kind: str = ""  # of the collective; "" inside of another one
    call: Call | None = field(init=False)

    def __post_init__(self) -> None:
        self.call = _issued.current
        if self.works:
            _in_flight[self] = None

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to wait for, nor to do."""
        return not self.works and self.finish is None

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` of this phase would return at once."""
        return all(work.is_completed() for work in self.works)

    def advance(self) -> Pending:
        """Block until this phase has ended; return the next one, or a finished collective."""
        span = observe.wait_span()
        if span is None or not self.kind:
            return self._complete()
        with span(self.kind):
            return self._complete()

    def _complete(self) -> Pending:
        works = self._take_works()
        if works:
            with waits_for(self.call, self.kind):
                for work in works:
                    work.wait()
        finish, self.finish = self.finish, None
        next_phase = finish() if finish is not None else None
        if next_phase is None:
            return self
        next_phase.kind = self.kind
        return next_phase

    def then(self, begin: Callable[[], Pending]) -> Pending:
        """Have a further collective follow as the next phase; return this one."""
        finish = self.finish

        def finish_and_begin() -> Pending:
            phase = finish() if finish is not None else None
            return begin() if phase is None else phase.then(begin)

        self.finish = finish_and_begin
        return self

    def wait(self) -> None:
        """Block until the result is in its buffer."""
        phase = self
        while not phase.is_done:
            phase = phase.advance()

    def _take_works(self) -> list[dist.Work]:
        """Return the works for their one wait: gloo never answers a second one."""
        works, self.works = self.works, []
        _in_flight.pop(self, None)
        return works


_waits: dict[int, Wait] = {}  # by thread


def on_failed_wait(end_if_parted: Callable[[], None] | None) -> None:
    """Have `end_if_parted` called in each thread whose wait for other ranks has failed, before the error is raised.

    None: nothing is called any more.
    """
    _issued.end_if_parted = end_if_parted


@contextlib.contextmanager
def waits_for(call: Call | None, kind: str) -> Iterator[None]:
    """Note that this thread waits for other ranks within the block."""
    thread_id = threading.get_ident()
    _waits[thread_id] = Wait(time.monotonic(), call, kind)
    try:
        yield
    except RuntimeError:
        if _issued.end_if_parted is not None:
            _issued.end_if_parted()
        raise
    finally:
        del _waits[thread_id]


def waiting() -> Wait | None:
    """Return what the thread that begins collectives waits for; None: it does not wait."""
    return _waits.get(_issued.thread_id)


# Held until they have been waited for, also when their engine has gone: gloo forgets a transfer whose handle is freed,
# and the peer's half of it would be matched with the next transfer between the two. The garbage collector frees at
# another moment on every rank.
_in_flight: dict[Pending, None] = {}


def drain(timeout: datetime.timedelta | None = None) -> None:
    """Wait for every collective in flight, at most `timeout` each (None: that of the group); failures do not matter.

    For the end of a process, because gloo aborts one that leaves with transfers in flight, such as the last step's
    gathers; and for the start of an engine, because these hold the buffers of engines that have gone. Every rank has
    begun what is waited for here, so it waits for no call of another rank that is yet to come.
    """
    for pending in list(_in_flight):
        for work in pending._take_works():
            with contextlib.suppress(RuntimeError):  # the peer has gone
                if timeout is None:
                    work.wait()
                else:
                    work.wait(timeout)
