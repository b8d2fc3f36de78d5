"""One rank, as a run sees it: all of its state in one record."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.base.progress import STARTING
from launcher.fleet.agent import Agent
from launcher.job.logs import RankLog
from launcher.job.outcome import Failure


@dataclass(frozen=True)
class Moment:
    """A time by the clock of a host, or by our monotonic one."""

    time_s: float
    host: Agent | None = None

    @property
    def ours_s(self) -> float:
        """By our clock, as far as is known now: what is known of a host's clock gets better with every heartbeat."""
        return self.time_s + (self.host.clock_offset_s if self.host is not None else 0.0)


@dataclass(frozen=True)
class Candidate:
    """A failure that may be the one which all others followed from."""

    is_lost_peer: bool  # it says of itself that another rank was gone before
    died: Moment
    failure: Failure
    late_status: int | None = None  # how the rank ended, where that seemed to be our own doing


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
    phase: str = STARTING  # what it is doing, as it has told
    raised_s: float | None = None  # since when it has been on its way out with an exception
    has_traceback: bool = False  # its traceback is in its log
    stack: str | None = None  # its answer to the last request for stacks
    failure: Candidate | None = None
    done: Moment | None = None  # when it ended with 0
