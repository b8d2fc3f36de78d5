"""One rank, as a run sees it: all of its state in one record."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.job.logs import RankLog
from launcher.job.outcome import Failure


@dataclass(frozen=True)
class Candidate:
    """A failure that may be the one which all others followed from."""

    is_lost_peer: bool  # it says of itself that another rank was gone before
    died_s: float  # our monotonic clock
    failure: Failure


@dataclass(eq=False)
class Rank:
    """One rank of a run, for the main thread; its reader sets `wrote_s`. Times are our monotonic clock."""

    number: int
    log: RankLog
    moved_s: float  # of its last progress, at first the start
    pid: int | None = None
    is_running: bool = True  # as far as is known: from the order to start it to its end
    was_stopped: bool = False  # it ended after the order to
    wrote_s: float = 0.0  # when its last output came
    num_heartbeats: int = 0
    raised_s: float | None = None  # since when it has been on its way out with an exception
    has_traceback: bool = False  # its traceback is in its log
    stack: str | None = None  # its answer to the last request for stacks
    failure: Candidate | None = None
    done_s: float | None = None  # when it ended with 0
