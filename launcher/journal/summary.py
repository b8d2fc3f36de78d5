"""What a run came to, in figures: from the history of its journal, for `launch show` and `launch report`.

Where ranks differ a figure is the mean over ranks, unless it says otherwise. Standard library only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from launcher.journal.history import NAN, History, RankHistory, Start
from launcher.journal.read import Record
from launcher.journal.records import COMMUNICATION, PHASES, useful_phases

# Time that trains. Without the engine the forward passes are part of the script's own work.
_TENTH = 0.1


@dataclass(frozen=True)
class Rate:
    """How fast a job trained: all its ranks together, in the time of its steps."""

    unit: str  # "tokens/s", "samples/s" or "steps/s"
    median: float
    first_tenth: float  # of the steps
    last_tenth: float
    mfu: float | None  # share of the device's peak FLOP/s; None: it, or the FLOPs of the model, are not known


@dataclass(frozen=True)
class SlowestRank:
    """The rank whose own time of a step, without waiting in collectives, is longest."""

    rank: int
    host: str | None
    own_s: float  # of a step
    median_own_s: float  # of all ranks


@dataclass(frozen=True)
class TryFacts:
    """One start of the job."""

    number: int
    begun_s: float | None
    ended_s: float | None
    exit_code: int | None  # None: the launcher did not say
    reason: str | None  # of the first failure
    raised: str  # the exception that the failed rank had raised; "": none


@dataclass(frozen=True)
class Summary:
    """The figures of a run. None: not known, or there is none of it."""

    job_id: str | None
    command: list[str]
    cwd: str | None
    hosts: list[str]
    world_size: int | None
    begun_s: float | None  # since the epoch
    duration_s: float | None
    exit_code: int | None
    failure: dict[str, Any] | None
    verdicts: list[Record]
    tries: list[TryFacts]
    has_engine: bool
    first_step: int | None
    last_step: int | None
    num_redone_steps: int  # that restarts have done again
    num_skipped_steps: int
    first_loss: float | None
    last_loss: float | None
    first_nonfinite_loss: int | None  # step
    rate: Rate | None
    goodput: float | None  # share of the job's time
    useful_s: float
    phases_s: dict[str, float]  # of all steps; with the engine or without, see `records.useful_phases`
    phases_of_step_s: dict[str, float]
    outside_s: float | None  # of no step: starting, restarting, ending
    peak_bytes: dict[int, float]  # by rank
    sent_bytes_of_step: float | None  # by one rank
    slowest: SlowestRank | None
    num_saves: int
    save_s: float  # that training waited for them
    logged: dict[str, Any] = field(default_factory=dict)  # the last of each value that the script logged
    is_sample: bool = False
    num_damaged: int = 0
    num_dropped: int = 0  # records that were lost

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data for JSON, in which NaN and infinity are texts."""
        found: dict[str, Any] = _plain(asdict(self))
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def summarize(history: History) -> Summary:
    """Return the figures of a history."""
    job = history.job
    begun_s, ended_s = history.begun_s, history.ended_s
    duration_s = None if begun_s is None or ended_s is None else ended_s - begun_s
    phases_s = _phases(history)
    num_steps = _mean_over_ranks(history, lambda _, rank: _total(rank, "num_steps"))
    in_steps_s = _mean_over_ranks(history, lambda _, rank: _total(rank, "duration_s"))
    useful_s = _useful(history)
    firsts, lasts = _step_range(history)
    end = history.starts[-1].end if history.starts else None
    exit_code, failure = _end_of(history, end)
    nonfinite = [rank.first_nonfinite_loss for rank in history.ranks() if rank.first_nonfinite_loss is not None]
    sent = _mean_over_ranks(history, lambda _, rank: _total(rank, "sent_bytes"))
    return Summary(
        job_id=job.get("job_id"),
        command=[str(word) for word in job.get("command") or []],
        cwd=job.get("cwd"),
        hosts=[str(host.get("name")) for host in job.get("hosts") or []],
        world_size=job.get("world_size") or (len(history.starts[-1].ranks) if history.starts else None) or None,
        begun_s=begun_s,
        duration_s=duration_s,
        exit_code=exit_code,
        failure=failure,
        verdicts=_verdicts(history),
        tries=[_try_facts(start) for start in history.starts],
        has_engine=any(rank.has_engine for rank in history.ranks()),
        first_step=firsts,
        last_step=lasts,
        num_redone_steps=_num_redone(history),
        num_skipped_steps=round(max((_total(rank, "skipped") for rank in history.ranks()), default=0.0)),
        first_loss=_loss(history, is_last=False),
        last_loss=_loss(history, is_last=True),
        first_nonfinite_loss=None if not nonfinite else int(min(nonfinite)),
        rate=_rate(history),
        goodput=useful_s / duration_s if duration_s and num_steps else None,
        useful_s=useful_s,
        phases_s=phases_s,
        phases_of_step_s={name: time_s / num_steps for name, time_s in phases_s.items()} if num_steps else {},
        outside_s=None if duration_s is None else max(0.0, duration_s - in_steps_s),
        peak_bytes=_peaks(history),
        sent_bytes_of_step=sent / num_steps if num_steps and sent else None,
        slowest=_slowest(history),
        num_saves=sum(max((len(each) for each in saves), default=0) for saves in _saves(history)),
        save_s=sum(max(map(_seconds_of, saves), default=0.0) for saves in _saves(history)),
        logged=last_logged(history),
        is_sample=history.is_sample,
        num_damaged=history.num_damaged,
        num_dropped=sum(int(r.get("num_records", 0)) for rank in history.ranks() for r in rank.of_kind("dropped")),
    )


# ---- sums over ranks and starts ----


def _known(values: Any) -> Iterator[float]:
    return (value for value in values if not math.isnan(value))


def _total(rank: RankHistory, name: str) -> float:
    """Return the sum of a column; of a sample, what it would be of all."""
    return rank.weight * sum(_known(rank.columns.get(name, ())))


def _mean_over_ranks(history: History, value: Callable[[Start, RankHistory], float]) -> float:
    """Return the sum over starts of the mean over their ranks."""
    total = 0.0
    for start in history.starts:
        values = [value(start, rank) for rank in start.ranks.values() if len(rank)]
        total += sum(values) / len(values) if values else 0.0
    return total


def _phases(history: History) -> dict[str, float]:
    sums = {
        name: _mean_over_ranks(history, lambda _, rank, name=name: _total(rank, name))  # type: ignore[misc]
        for name in PHASES
    }
    return {name: time_s for name, time_s in sums.items() if time_s}


def _verdicts(history: History) -> list[Record]:
    """Return each verdict as it was told last: it may have become critical, or be gone."""
    last = {tuple(map(str, map(record.get, ("name", "rank", "host")))): record for record in history.events("verdict")}
    return list(last.values())


def _useful(history: History) -> float:
    """Return the seconds that trained and were not done again."""

    def useful(start: Start, rank: RankHistory) -> float:
        phases = useful_phases(has_forward=rank.has_engine)
        columns = rank.columns
        if math.isinf(start.kept_until):
            return sum(_total(rank, name) for name in phases)
        shares = map(start.kept_share, columns["step"], columns["num_steps"])
        times = zip(*(columns[name] for name in phases), strict=True)
        return rank.weight * float(sum(share * sum(each) for share, each in zip(shares, times, strict=True)))

    return _mean_over_ranks(history, useful)


def _num_redone(history: History) -> int:
    """Return how many steps were done again, by the rank that lost most of them."""
    total = 0.0
    for start in history.starts:
        lost = [rank.columns["step"][-1] - start.kept_until for rank in start.ranks.values() if len(rank)]
        total += max([0.0, *lost])
    return int(total)


def _step_range(history: History) -> tuple[int | None, int | None]:
    ranks = [rank.columns for rank in history.ranks() if len(rank)]
    if not ranks:
        return None, None
    firsts = [int(columns["step"][0] - columns["num_steps"][0]) + 1 for columns in ranks]
    return min(firsts), int(max(max(columns["step"]) for columns in ranks))


def _peaks(history: History) -> dict[int, float]:
    peaks: dict[int, float] = {}
    for rank in history.ranks():
        peak = max(_known(rank.columns.get("peak_bytes", ())), default=None)
        if peak is not None:
            peaks[rank.rank] = max(peak, peaks.get(rank.rank, 0.0))
    return dict(sorted(peaks.items()))


# ---- figures ----


def _loss(history: History, *, is_last: bool) -> float | None:
    """Return the mean over ranks of the first, or the last, loss that each knows; None without any."""
    for start in reversed(history.starts) if is_last else history.starts:
        found = []
        for rank in start.ranks.values():
            values = rank.columns.get("loss", ())
            value = next(_known(reversed(values) if is_last else values), None)
            found += [] if value is None else [value]
        if found:
            return statistics.fmean(found)
    return None


def share_of_ranks(history: History, column: str) -> float:
    """Return which share of what ranks count is the job's: less than 1 where tensor, pipeline or sequence parallel
    ranks count the same samples, by the batch sizes of the engine's config.
    """
    config = history.engine.get("config")
    if column == "num_steps" or not isinstance(config, dict):
        return 1.0
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes: list[Any] = [config.get(name) for name in names]
    world_size = history.job.get("world_size")
    if not world_size or not all(isinstance(size, int) and size > 0 for size in sizes):
        return 1.0
    batch, micro, accumulation = map(float, sizes)
    # Sequence parallel ranks have parts of a sequence each: no token is counted twice.
    parts = config.get("sequence_parallel_size") or 1 if column == "tokens" else 1
    return min(1.0, batch * float(parts) / (micro * accumulation * float(world_size)))


def rate_column(history: History) -> tuple[str, str]:
    """Return the column that tells best what was trained on, and the unit of its rate."""
    for name, unit in (("tokens", "tokens/s"), ("samples", "samples/s")):
        if any(value > 0 for rank in history.ranks() for value in rank.columns.get(name, ())):
            return name, unit
    return "num_steps", "steps/s"


def _rate(history: History) -> Rate | None:
    column, unit = rate_column(history)
    first, last = _step_range(history)
    if first is None or last is None:
        return None
    world_size = max(len(start.ranks) for start in history.starts)
    # Of a sample of ranks, and in steps, the mean is what counts.
    num_ranks = float(history.job.get("world_size") or world_size)
    factor = 1.0 if column == "num_steps" else num_ranks * share_of_ranks(history, column)
    tenth = max(1.0, (last - first + 1) * _TENTH)
    medians = [_median_rate(rank, column) for rank in history.ranks() if len(rank)]
    median = statistics.fmean(medians)
    if not median:
        return None
    return Rate(
        unit=unit,
        median=factor * median,
        first_tenth=factor * _rate_between(history, column, first, first - 1 + tenth),
        last_tenth=factor * _rate_between(history, column, last + 1 - tenth, last),
        mfu=_mfu(history),
    )


def _median_rate(rank: RankHistory, column: str) -> float:
    pairs = zip(rank.columns[column], rank.columns["duration_s"], strict=True)
    return statistics.median([value / time_s for value, time_s in pairs if time_s > 0 and value >= 0] or [0.0])


def _rate_between(history: History, column: str, first: float, last: float) -> float:
    """Return the mean rate of a rank in the steps of these numbers, by the records that have one of them."""
    amount = time_s = 0.0
    for rank in history.ranks():
        columns = rank.columns
        if not len(rank):
            continue
        used = (columns[name] for name in ("step", "num_steps", column, "duration_s"))
        for step, num_steps, value, duration_s in zip(*used, strict=True):
            if first <= step < last + num_steps and value >= 0:
                amount += value
                time_s += duration_s
    return amount / time_s if time_s else NAN


def _mfu(history: History) -> float | None:
    """Return the FLOPs of the model over what the devices could have done in the time of the steps.

    Mean over the ranks that have counted them.
    """
    peak = history.engine.get("peak_flops")
    shares = []
    for rank in history.ranks():
        time_s = _total(rank, "duration_s")
        for record in rank.of_kind("flops")[-1:]:
            flops = float(record.get("flops") or 0.0) * float(record.get("micro_batches") or 1.0)
            if peak and time_s and flops:
                shares.append(flops * _total(rank, "num_steps") / (time_s * peak))
    return statistics.fmean(shares) if shares else None


def _slowest(history: History) -> SlowestRank | None:
    """Return the rank with the longest own time, among at least two of the engine."""
    own: dict[int, list[float]] = {}
    hosts: dict[int, str | None] = {}
    for start in history.starts:
        for rank in start.ranks.values():
            if rank.has_engine and (num_steps := _total(rank, "num_steps")):
                own_s = _total(rank, "duration_s") - _total(rank, COMMUNICATION)
                own.setdefault(rank.rank, []).append(own_s / num_steps)
                hosts[rank.rank] = start.host_of(rank.rank)
    if len(own) < 2:
        return None
    means = {rank: statistics.fmean(values) for rank, values in own.items()}
    slowest = max(means, key=lambda rank: means[rank])
    return SlowestRank(slowest, hosts[slowest], means[slowest], statistics.median(means.values()))


def _end_of(history: History, end: Record | None) -> tuple[int | None, dict[str, Any] | None]:
    """Return exit code and first failure, by the launcher's report or its last record."""
    report = history.report or {}
    exit_code = report.get("exit_code", (end or {}).get("exit_code"))
    failure = report.get("failure") or (end or {}).get("failure")
    return exit_code if isinstance(exit_code, int) else None, failure if isinstance(failure, dict) else None


def _try_facts(start: Start) -> TryFacts:
    end = start.end or {}
    failure = end.get("failure")
    reason = failure.get("reason") if isinstance(failure, dict) else None
    rank = failure.get("rank") if isinstance(failure, dict) else None
    raised = (event for event in start.events if event["kind"] == "raised" and event.get("rank") == rank)
    words = next((f"{event.get('type')}: {event.get('message')}" for event in raised), "")
    return TryFacts(start.number, start.begun_s, start.ended_s, end.get("exit_code"), reason, words)


def _saves(history: History) -> list[list[list[Record]]]:
    """Return the saves of each rank in each start."""
    return [[rank.of_kind("save") for rank in start.ranks.values()] for start in history.starts]


def _seconds_of(saves: list[Record]) -> float:
    return sum(float(save.get("duration_s") or 0.0) for save in saves)


def last_logged(history: History) -> dict[str, Any]:
    """Return the last of each value that a script logged, of the lowest rank that did."""
    found: dict[str, Any] = {}
    for start in history.starts:
        for rank in sorted(start.ranks.values(), key=lambda rank: -rank.rank):
            for record in rank.of_kind("log"):
                if isinstance(record.get("values"), dict):
                    found.update(record["values"])
    return found
