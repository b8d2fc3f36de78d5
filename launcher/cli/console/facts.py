"""What is known of a run while it runs: the facts the panel shows, kept by one thread and read by another."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from launcher.base.progress import BETWEEN_STEPS, NO_PROGRESS, TRAINING, RankProgress
from launcher.base.units import counted
from launcher.job.events import Watcher
from launcher.journal.verdicts import Verdict
from launcher.plan.plan import JobPlan

_RATE_SAMPLES = 10  # about as many seconds: agents tell once a second
_STALL_S = 5.0  # after it the time since the last step is shown in place of a rate that is none


@dataclass
class _Rank:
    """One rank, as last told."""

    has_started: bool = False
    status: int | None = None  # exit code or minus the signal, None while it runs
    steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RATE_SAMPLES))  # monotonic, step
    progress: RankProgress = NO_PROGRESS


@dataclass(frozen=True)
class Pace:
    """How far some ranks are."""

    step: int | None = None  # of the slowest one; None: none has told
    steps_per_s: float | None = None  # None: not known yet
    idle_s: float = 0.0  # since their last step
    total_steps: int | None = None  # None: not known

    @property
    def is_stalled(self) -> bool:
        """Whether a step takes so much longer than before that the rate means nothing."""
        usual_s = 1 / self.steps_per_s if self.steps_per_s else 0.0
        return self.step is not None and self.idle_s > max(_STALL_S, 3 * usual_s)

    @property
    def left_s(self) -> float | None:
        """How long the steps that are left take at this rate; None where that is not known."""
        if self.step is None or self.total_steps is None or not self.steps_per_s or self.is_stalled:
            return None
        return max(0, self.total_steps - self.step) / self.steps_per_s


@dataclass(frozen=True)
class HostView:
    """One host, to be shown."""

    name: str
    num_starting: int
    running: Counter[str]  # what the ranks that run are doing -> how many; "running" where they have not said so
    num_ended: int  # with exit code 0
    num_failed: int
    pace: Pace


@dataclass(frozen=True)
class RunView:
    """A run, to be shown."""

    job_id: str
    size: str
    elapsed_s: float
    restart: int
    is_stopping: bool
    pace: Pace
    loss: float | None
    verdicts: list[Verdict]  # what is wrong with the training, the worst first
    trouble: str  # the last warning, or why the ranks are stopped; "" where there is none
    hosts: list[HostView]


class RunFacts(Watcher):
    """Collects the events of a run; `view` may be called from another thread."""

    def __init__(self, plan: JobPlan, now_s: float | None = None) -> None:
        """now_s: monotonic clock."""
        self._lock = threading.Lock()
        self._start_s = time.monotonic() if now_s is None else now_s
        self._trouble = ""
        self._verdicts: dict[object, Verdict] = {}
        RunFacts.planned(self, plan)  # and not what a subclass does at the start of ranks

    def planned(self, plan: JobPlan) -> None:
        with self._lock:
            self._plan = plan
            self._ranks = {rank: _Rank() for rank in plan.placement.ranks}
            self._is_stopping = False
            self._verdicts.clear()

    def started(self, rank: int) -> None:
        with self._lock:
            self._ranks[rank].has_started = True

    def ended(self, rank: int, status: int) -> None:
        with self._lock:
            self._ranks[rank].status = status

    def progress(self, rank: int, progress: RankProgress, now_s: float | None = None) -> None:
        """now_s: monotonic clock."""
        now_s = time.monotonic() if now_s is None else now_s
        with self._lock:
            self._ranks[rank].progress = progress
            step, steps = progress.reached_step, self._ranks[rank].steps
            if step is None:
                return
            if steps and step < steps[-1][1]:  # it starts over, or has begun to count steps of its own
                steps.clear()
            if not steps or step > steps[-1][1]:
                steps.append((now_s, step))

    def warning(self, text: str) -> None:
        with self._lock:
            self._trouble = text

    def verdict(self, verdict: Verdict) -> None:
        with self._lock:
            self._verdicts.pop(verdict.key, None)
            if verdict.until_step is None:
                self._verdicts[verdict.key] = verdict

    def stopping(self, why: str) -> None:
        with self._lock:
            self._is_stopping = True
            self._trouble = why

    def view(self, now_s: float | None = None) -> RunView:
        """Return what is known at `now_s` (monotonic clock)."""
        now_s = time.monotonic() if now_s is None else now_s
        with self._lock:
            nodes = self._plan.placement.nodes
            losses = (rank.progress.loss for rank in self._ranks.values() if rank.progress.loss is not None)
            return RunView(
                job_id=self._plan.job_id,
                size=_size(self._plan),
                elapsed_s=now_s - self._start_s,
                restart=self._plan.restart,
                is_stopping=self._is_stopping,
                pace=_pace(self._ranks.values(), now_s),
                loss=next(losses, None),
                verdicts=sorted(self._verdicts.values(), key=lambda each: each.severity != "critical"),
                trouble=self._trouble,
                hosts=[_host(node.host.name, [self._ranks[rank] for rank in node.ranks], now_s) for node in nodes],
            )


def _size(plan: JobPlan) -> str:
    sizes = sorted({node.num_ranks for node in plan.placement.nodes})
    least = f"{sizes[0]}–" if len(sizes) > 1 else ""
    return f"{counted(len(plan.placement.nodes), 'host')} × {least}{counted(sizes[-1], 'rank')}"


def _host(name: str, ranks: list[_Rank], now_s: float) -> HostView:
    over = [rank.status for rank in ranks if rank.status is not None]
    num_starting = sum(not rank.has_started and rank.status is None for rank in ranks)
    num_failed = sum(status != 0 for status in over)
    pace = _pace(ranks, now_s)
    running = Counter(_phase(rank, pace) for rank in ranks if rank.has_started and rank.status is None)
    return HostView(name, num_starting, running, len(over) - num_failed, num_failed, pace)


def _phase(rank: _Rank, pace: Pace) -> str:
    """Return the phase of a running rank. Between two steps of a steady pace it is still training."""
    if rank.progress.phase == BETWEEN_STEPS and not pace.is_stalled:
        return TRAINING
    return rank.progress.phase or "running"


def _pace(ranks: Iterable[_Rank], now_s: float) -> Pace:
    """Return how far the slowest of the ranks is that still run; of all when none does."""
    counting = [rank for rank in ranks if rank.steps]
    counting = [rank for rank in counting if rank.status is None] or counting
    if not counting:
        return Pace()
    slowest = min(counting, key=lambda rank: rank.steps[-1][1])
    (first_s, first), (last_s, last) = slowest.steps[0], slowest.steps[-1]
    rate = (last - first) / (last_s - first_s) if last_s > first_s else None
    return Pace(last, rate, now_s - last_s if slowest.status is None else 0.0, slowest.progress.total_steps)
