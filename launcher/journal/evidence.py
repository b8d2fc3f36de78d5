"""What the records of a journal add up to: sums of each rank's steps, cut into windows that all ranks share.

A window ends once it has lasted for a while and nearly every rank has taken a few steps in it. What is compared
between ranks, and with the run's own past, are the means of a step in such windows. Adding a record costs a few
additions; medians over ranks are taken once a window.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from launcher.journal.records import BACKWARD, COMMUNICATION, FORWARD, PHASES

Record = dict[str, Any]

WARM_UP_STEPS = 5  # compilers, allocators and caches fill then
_WINDOW_S = 2.0
_WINDOW_STEPS = 3
_ENOUGH_RANKS = 0.9  # of those that take steps
_NUM_LOSSES = 64  # of a rank, whose median the next one is compared with
_LEAST_LOSSES, _LOSSES_A_LOOK = 16, 8
_FAR_SPREADS = 10  # from the median: no tail of a healthy loss is as long for several records in a row
_NUM_FLOORS = 32  # of a rank's memory: when there are more, neighbours become one


@dataclass
class StepSums:
    """The steps of one rank within a window."""

    num_steps: int = 0
    duration_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    skipped: int = 0
    losses: list[float] = field(default_factory=list)
    least_bytes: float = math.inf  # of memory

    def add(self, record: Record) -> None:
        """Add a record of steps."""
        self.num_steps += number(record, "num_steps")
        self.duration_s += number(record, "duration_s")
        for name, time_s in record.get("phases", {}).items():
            self.phases[name] = self.phases.get(name, 0.0) + time_s
        self.skipped += number(record, "skipped")
        loss = record.get("loss")
        if isinstance(loss, (int, float)):
            self.losses.append(loss)
        self.least_bytes = min(self.least_bytes, number(record, "memory_bytes") or math.inf)


class LossHistory:
    """Finds losses of a rank that are far above the median of those before. Medians are taken every few records."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_NUM_LOSSES)
        self._first: float | None = None
        self._limit, self._median, self._num_new = math.inf, 0.0, 0
        self.num_spikes = 0  # in a row
        self.begun: tuple[int, float, float] = (
            0,
            0.0,
            0.0,
        )  # step and loss of the first of them, and the median before

    @property
    def has_any(self) -> bool:
        """Whether the rank has told a loss."""
        return self._first is not None

    def add(self, step: int, loss: float) -> None:
        """Add the loss of a record, a finite number."""
        if loss > self._limit and self.num_spikes < _NUM_LOSSES:  # as many are what is usual now
            if not self.num_spikes:
                self.begun = step, loss, self._median
            self.num_spikes += 1
            return
        if self.num_spikes >= _NUM_LOSSES:
            self._usual.clear()
            self._limit = math.inf
        self.num_spikes = 0
        self._usual.append(loss)
        self._num_new += 1
        if self._first is None:
            self._first = loss
        if len(self._usual) >= _LEAST_LOSSES and self._num_new >= _LOSSES_A_LOOK:
            self._num_new = 0
            self._median = median(self._usual)
            far = max(_FAR_SPREADS * spread(self._usual), abs(self._median) / 2, abs(self._first) / 10)
            self._limit = self._median + far


@dataclass
class RankEvidence:
    """What is known of one rank."""

    host: str = ""
    first_step: int | None = None
    step: int = 0  # the last one
    sums: StepSums = field(default_factory=StepSums)  # of the window that is open
    has_warmed_up: bool = False
    # Loss
    losses: LossHistory = field(default_factory=LossHistory)
    nonfinite: tuple[int, str] | None = None  # the first step, and which number it was
    nonfinite_s: float = 0.0  # when it was told
    last_finite: int = 0  # the last step before it of which is known that it was finite
    num_finite: int = 0  # records since then
    finite_step: int = 0  # of the last of them
    record_s: float = 0.0  # the time of the steps of the last record
    # Modules whose output, and parameters whose gradient, was not finite, with the step.
    modules: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=16))
    loss_scale: float | None = None
    largest_scale: float = 0.0
    # Samples of the process
    gc_longest_s: float = 0.0
    throttled: tuple[int, str] = (0, "")  # in how many samples in a row, and why
    # Share of the time in which a thread was ready to run, and had no processor; None: the next sample will tell.
    waits_for_cpu: float | None = 0.0
    last_sample: Record | None = None
    # Saves
    saves: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=8))  # time, seconds
    num_saves: int = 0
    # The least memory of windows; a step of 2^n windows each
    floors: list[float] = field(default_factory=list)
    floor_windows: int = 1
    open_floor: tuple[int, float] = (0, math.inf)
    # Progress, by the launcher's records
    beats: int | None = None
    moved_s: float = 0.0
    phase: str = ""  # as the rank calls it
    clock_phase: str = ""  # of its step's clock, as last sampled
    is_over: bool = False

    def add_floor(self, least_bytes: float) -> None:
        """Add the least memory of a window; a run of any length has a bounded number of them."""
        count, least = self.open_floor
        count, least = count + 1, min(least, least_bytes)
        if count < self.floor_windows:
            self.open_floor = count, least
            return
        self.open_floor = 0, math.inf
        if math.isfinite(least):
            self.floors.append(least)
        if len(self.floors) > _NUM_FLOORS:
            self.floors = [min(pair) for pair in zip(self.floors[::2], self.floors[1::2], strict=False)]
            self.floor_windows *= 2

    @property
    def first_module(self) -> str | None:
        """The first module or parameter that was told since all was finite."""
        return next((name for step, name in self.modules if step > self.last_finite), None)


@dataclass(frozen=True)
class Window:
    """The mean steps of all ranks within one window, in the order of `ranks`."""

    first_step: int
    last_step: int
    time_s: float  # its end
    ranks: list[int]
    hosts: list[str]
    step_s: list[float]
    phases: dict[str, list[float]]  # seconds of a step
    wait_phases: tuple[str, ...]  # in which a rank waits for others
    waits_for_cpu: list[float]
    knows_waits_for_cpu: bool  # of every rank
    losses: list[float | None]  # means
    skipped: float  # share of steps

    @cached_property
    def iteration_s(self) -> float:
        """The seconds of a step: the median of ranks."""
        return median(self.step_s)

    def phase(self, name: str) -> list[float]:
        """Return the seconds of a phase by rank."""
        return self.phases.get(name) or [0.0] * len(self.ranks)

    def waits(self) -> list[float]:
        """Return the seconds of a step by rank in which others may have been waited for."""
        return [sum(each) for each in zip(*(self.phase(name) for name in self.wait_phases), strict=True)]

    def usual(self, name: str) -> float:
        """Return the median of a phase over ranks; of two the lesser: what both have."""
        return median_low(self.phase(name))


class Evidence:
    """Adds up records, rank by rank. `feed` returns the windows that a record has ended: none, nearly always."""

    def __init__(self) -> None:
        self.world_size = 0
        self.hosts: dict[int, str] = {}
        self.ranks: dict[int, RankEvidence] = {}
        self.now_s = 0.0  # the latest time of a record
        self.looked_s: float | None = None  # by the clock of who asks for verdicts, the last time
        self._opened_s: float | None = None
        self._num_counting = 0  # ranks that take steps, after warming up
        self._num_ready = 0  # of them, those that have enough of them in the window that is open

    def rank(self, number: int) -> RankEvidence:
        """Return what is known of a rank."""
        found = self.ranks.get(number)
        if found is None:
            found = self.ranks[number] = RankEvidence(self.hosts.get(number, ""))
        return found

    def waits_now(self, rank: RankEvidence) -> bool:
        """Whether a rank, when it was last sampled, was in what may be waiting for others."""
        return rank.clock_phase in (COMMUNICATION, BACKWARD)

    def where(self, number: int) -> str:
        """Return `rank 3`, with its host where there are several."""
        host = self.hosts.get(number, "")
        return f"rank {number} ({host})" if host and len(set(self.hosts.values())) > 1 else f"rank {number}"

    def add_step(self, number: int, record: Record) -> Window | None:
        """Add a record of steps; return the window that it has ended, if it has."""
        rank = self.rank(number)
        is_new = rank.first_step is None
        if rank.first_step is None:
            rank.first_step = int(record["step"]) - int(record.get("num_steps", 1)) + 1
        rank.step = int(record["step"])
        if is_new or rank.step - rank.first_step < WARM_UP_STEPS:
            return None
        if self._opened_s is None:
            self._opened_s = float(record["time_s"])
        before = rank.sums.num_steps
        if not rank.has_warmed_up:
            rank.has_warmed_up = True
            self._num_counting += 1
        rank.sums.add(record)
        self._num_ready += before < _WINDOW_STEPS <= rank.sums.num_steps
        is_long = float(record["time_s"]) - self._opened_s >= _WINDOW_S
        if not is_long or self._num_ready < _ENOUGH_RANKS * self._num_counting:
            return None
        return self._close(float(record["time_s"]))

    def _close(self, time_s: float) -> Window | None:
        found = sorted((number, rank) for number, rank in self.ranks.items() if rank.sums.num_steps)
        self._opened_s, self._num_ready = time_s, 0
        names = {name for _, rank in found for name in rank.sums.phases if name in PHASES}
        skipped = sum(rank.sums.skipped for _, rank in found) / sum(rank.sums.num_steps for _, rank in found)
        window = Window(
            first_step=min(rank.step - rank.sums.num_steps + 1 for _, rank in found),
            last_step=max(rank.step for _, rank in found),
            time_s=time_s,
            ranks=[number for number, _ in found],
            hosts=[self.hosts.get(number, "") for number, _ in found],
            step_s=[rank.sums.duration_s / rank.sums.num_steps for _, rank in found],
            phases={
                name: [rank.sums.phases.get(name, 0.0) / rank.sums.num_steps for _, rank in found] for name in names
            },
            # Without the engine a rank waits for the others inside of `backward()`.
            wait_phases=(COMMUNICATION,) if FORWARD in names else (BACKWARD, COMMUNICATION),
            waits_for_cpu=[rank.waits_for_cpu or 0.0 for _, rank in found],
            knows_waits_for_cpu=all(rank.waits_for_cpu is not None for _, rank in found),
            losses=[mean(rank.sums.losses) if rank.sums.losses else None for _, rank in found],
            skipped=skipped,
        )
        for _, rank in found:
            rank.add_floor(rank.sums.least_bytes)
            rank.sums = StepSums()
        return window


def number(record: Record, name: str) -> Any:
    """Return a number of a record; 0 where it has none."""
    value = record.get(name)
    return value if isinstance(value, (int, float)) else 0


def median(values: Iterable[float]) -> float:
    """Return the median. (`statistics` would load a fifth of the standard library into the launcher.)"""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def median_low(values: Iterable[float]) -> float:
    """Return the median, of an even number of values the lesser of the two in the middle."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def mean(values: Sequence[float]) -> float:
    """Return the mean."""
    return math.fsum(values) / len(values)


def spread(values: Sequence[float]) -> float:
    """Return the median distance from the median, scaled as a standard deviation: outliers do not move it."""
    if not values:
        return 0.0
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)
