"""The history of a run as curves of a bounded number of points: over steps, and over time. Standard library only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from launcher.journal.history import History, RankHistory, Start
from launcher.journal.records import COMMUNICATION, PHASES
from launcher.journal.summary import rate_column, share_of_ranks

MAX_POINTS = 600  # of a curve: a screen shows no more
MAX_BARS = 120
MAX_COLUMNS, MAX_ROWS = 300, 200  # of the map of waiting


@dataclass
class Curve:
    """Points of what ranks have recorded: the mean of each place on the axis, and the range there."""

    xs: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.xs)


class _Buckets:
    """Puts points of an axis together, in steps of one width."""

    def __init__(self, low: float, width: float) -> None:
        self._low, self._width = low, width
        self._points: dict[int, list[tuple[float, float]]] = {}

    def add(self, x: float, y: float) -> None:
        self._points.setdefault(int((x - self._low) // self._width), []).append((x, y))

    def curve(self) -> Curve:
        curve = Curve()
        for _, points in sorted(self._points.items()):
            ys = [y for _, y in points]
            curve.xs.append(statistics.fmean(x for x, _ in points))
            curve.means.append(statistics.fmean(ys))
            curve.lows.append(min(ys))
            curve.highs.append(max(ys))
        return curve


def _ranks(history: History) -> Iterator[tuple[Start, RankHistory]]:
    for start in history.starts:
        yield from ((start, rank) for rank in start.ranks.values() if len(rank))


def _step_width(history: History, max_points: int) -> tuple[float, float]:
    """Return the first step, and how many steps a point stands for: each rank has a record among them."""
    low, high, record = math.inf, -math.inf, 1.0
    for _, rank in _ranks(history):
        steps = rank.columns["step"]
        low, high = min(low, *steps), max(high, *steps)
        record = max(record, statistics.median(rank.columns["num_steps"]))
    return low, max(math.ceil((high - low + 1) / max_points), math.ceil(record))


def over_steps(history: History, column: str) -> tuple[Curve, Curve]:
    """Return a column over steps, and apart from it what a restart has done again."""
    if not any(True for _ in _ranks(history)):
        return Curve(), Curve()
    low, width = _step_width(history, MAX_POINTS)
    kept, redone = _Buckets(low, width), _Buckets(low, width)
    for start, rank in _ranks(history):
        columns = rank.columns
        for step, num_steps, value in zip(columns["step"], columns["num_steps"], columns[column], strict=True):
            if math.isfinite(value):
                (kept if start.kept_share(step, num_steps) > 0.5 else redone).add(step, value)
    return kept.curve(), redone.curve()


def phases_over_steps(history: History) -> tuple[list[float], float, dict[str, list[float]]]:
    """Return steps, their distance, and the seconds of a step in each phase: means over ranks, all starts together."""
    if not any(True for _ in _ranks(history)):
        return [], 1.0, {}
    low, width = _step_width(history, MAX_BARS)
    counts: dict[int, float] = {}
    times: dict[str, dict[int, float]] = {name: {} for name in PHASES}
    for _, rank in _ranks(history):
        places = [int((step - low) // width) for step in rank.columns["step"]]
        for place, num_steps in zip(places, rank.columns["num_steps"], strict=True):
            counts[place] = counts.get(place, 0.0) + num_steps
        for name, sums in times.items():
            for place, time_s in zip(places, rank.columns[name], strict=True):
                if time_s:
                    sums[place] = sums.get(place, 0.0) + time_s
    places = sorted(counts)
    found = {name: [sums.get(place, 0.0) / counts[place] for place in places] for name, sums in times.items() if sums}
    return [low + place * width + (width - 1) / 2 for place in places], width, found


@dataclass
class WaitingMap:
    """Which share of their time ranks waited in collectives. Rows are ranks, or several together."""

    steps: list[float]
    ranks: list[tuple[int, int]]  # first and last of each row
    shares: list[list[float | None]]  # None: no record there


def waiting(history: History) -> WaitingMap | None:
    """Return the map of waiting; None where that was not measured, or of one rank alone."""
    numbers = sorted({rank.rank for _, rank in _ranks(history) if rank.has_engine or any(rank.columns[COMMUNICATION])})
    if len(numbers) < 2:
        return None
    low, width = _step_width(history, MAX_COLUMNS)
    group = math.ceil(len(numbers) / MAX_ROWS)
    rows = [numbers[place : place + group] for place in range(0, len(numbers), group)]
    row_of = {rank: place for place, row in enumerate(rows) for rank in row}
    sums: list[dict[int, tuple[float, float]]] = [{} for _ in rows]
    for _, rank in _ranks(history):
        if rank.rank not in row_of:
            continue
        row = sums[row_of[rank.rank]]
        columns = (rank.columns[name] for name in ("step", COMMUNICATION, "duration_s"))
        for step, waited_s, duration_s in zip(*columns, strict=True):
            place = int((step - low) // width)
            before = row.get(place, (0.0, 0.0))
            row[place] = before[0] + waited_s, before[1] + duration_s
    places = sorted({place for row in sums for place in row})
    cells = [[_share(row.get(place)) for place in places] for row in sums]
    steps = [low + place * width + (width - 1) / 2 for place in places]
    return WaitingMap(steps, [(row[0], row[-1]) for row in rows], cells)


def _share(times: tuple[float, float] | None) -> float | None:
    return None if times is None or not times[1] else times[0] / times[1]


# ---- over time, in seconds since the job began ----


def _time_buckets(history: History) -> tuple[float, float, int]:
    """Return begin and width of the buckets of time in which steps were done, and how many there are."""
    firsts = [rank.columns["time_s"][0] - rank.columns["duration_s"][0] for _, rank in _ranks(history)]
    lasts = [rank.columns["time_s"][-1] for _, rank in _ranks(history)]
    begin, end = min(firsts), max(lasts)
    count = max(1, min(MAX_BARS * 2, max(len(rank) for _, rank in _ranks(history))))
    return begin, max(end - begin, 1e-6) / count, count


def rate_over_time(history: History) -> Curve:
    """Return the rate of all ranks over time, zero where no step was done. Its unit is that of `rate_column`."""
    if not any(True for _ in _ranks(history)):
        return Curve()
    column, _ = rate_column(history)
    begin, width, count = _time_buckets(history)
    amounts, share = [0.0] * count, share_of_ranks(history, column)
    for start, rank in _ranks(history):
        factor = 1 / max(1, len(start.ranks)) if column == "num_steps" else share
        columns = (rank.columns[name] for name in ("time_s", "duration_s", column))
        for time_s, duration_s, amount in zip(*columns, strict=True):
            if amount > 0:
                _spread(amounts, (time_s - duration_s - begin) / width, (time_s - begin) / width, amount * factor)
    offset = begin - (history.begun_s or begin)
    rates = [amount / width for amount in amounts]
    return Curve([offset + (place + 0.5) * width for place in range(count)], rates, rates, rates)


def _spread(amounts: list[float], low: float, high: float, amount: float) -> None:
    """Add an amount to the buckets from `low` to `high`, evenly over that span."""
    last = len(amounts) - 1
    first_place, last_place = max(0, min(int(low), last)), max(0, min(int(high), last))
    if first_place == last_place or high <= low:
        amounts[last_place] += amount
        return
    for place in range(first_place, last_place + 1):
        share = min(high, place + 1) - max(low, place)
        amounts[place] += amount * max(0.0, share) / (high - low)


def over_time(history: History, column: str) -> Curve:
    """Return a column over time: mean and range over ranks."""
    if not any(True for _ in _ranks(history)):
        return Curve()
    begin, width, _ = _time_buckets(history)
    offset = history.begun_s or begin
    buckets = _Buckets(begin - offset, 2 * width)  # some record of each rank is in each
    for _, rank in _ranks(history):
        for time_s, value in zip(rank.columns["time_s"], rank.columns[column], strict=True):
            if math.isfinite(value):
                buckets.add(time_s - offset, value)
    return buckets.curve()


def logged(history: History) -> dict[str, tuple[str, Curve]]:
    """Return the numbers that a script logged: name -> "step" or "time", and the curve over it."""
    points: dict[str, list[tuple[float, float, bool]]] = {}
    offset = history.begun_s or 0.0
    for rank in history.ranks():
        for record in rank.of_kind("log"):
            values = record.get("values")
            step = _as_number(values.get("step")) if isinstance(values, dict) else None
            for name, value in values.items() if isinstance(values, dict) else ():
                number = _as_number(value)
                if number is not None and name != "step":
                    x = record["time_s"] - offset if step is None else step
                    points.setdefault(name, []).append((x, number, step is not None))
    return {name: _logged_curve(each) for name, each in points.items()}


def _as_number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number else None  # type: ignore[arg-type]


def _logged_curve(points: Iterable[tuple[float, float, bool]]) -> tuple[str, Curve]:
    """Return the curve of points over steps, where each of them has one, else over time."""
    points = list(points)
    has_steps = all(is_step for _, _, is_step in points)
    used = [(x, y) for x, y, is_step in points if is_step == has_steps]
    low, high = min(x for x, _ in used), max(x for x, _ in used)
    width = max((high - low) / MAX_POINTS, 1.0 if has_steps else 1e-3)
    buckets = _Buckets(low, width)
    for x, y in used:
        buckets.add(x, y)
    return "step" if has_steps else "time", buckets.curve()
