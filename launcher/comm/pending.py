"""Collectives in flight."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from launcher.comm import observe


@dataclass(eq=False)
class Pending:
    """A collective in flight. Buffers must not be touched before `wait()`, which is idempotent.

    A collective may have phases: what `finish` returns is the next one, in flight.
    """

    works: list[dist.Work] = field(default_factory=list)
    finish: Callable[[], Pending | None] | None = None  # local work left after the last byte has arrived
    kind: str = ""  # of the collective; "" inside of another one

    def __post_init__(self) -> None:
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
        global _waiting_since_s
        works = self._take_works()
        if works:
            _waiting_since_s = time.monotonic()
            try:
                for work in works:
                    work.wait()
            finally:
                _waiting_since_s = None
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
            if finish is not None:
                finish()
            return begin()

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


_waiting_since_s: float | None = None


def waiting_since_s() -> float | None:
    """Return when this process began to wait for a collective (`time.monotonic`); None: it does not wait."""
    return _waiting_since_s


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
