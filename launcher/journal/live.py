"""Follow the journal of one job: where it is, what each rank does, curves, verdicts. While it runs and after its end.

Looks are incremental and bounded: of a file that is large when it is first seen the end is read, and of a curve's
earlier part a sample; of very many ranks some are read at each look. No torch, and no more than json.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.base.progress import BETWEEN_STEPS, STARTING, TRAINING
from launcher.journal.read import JobJournal, JournalFile, Record, TryJournal
from launcher.journal.records import COMMUNICATION, FORWARD, LAUNCHER_RECORDS, useful_phases

LOSS, STEPS_PER_S, TOKENS_PER_S = "loss", "steps/s", "tokens/s"
SLOW_FACTOR = 1.2  # a rank whose own time is less above the median is as quick as the others
_SILENCE_S = 10.0  # and three steps: after it a rank that says nothing is named
_RANKS_A_SECOND = 100  # of which the launcher notes progress
_WINDOW_S = 10.0  # of steps that rates and times are means of
_MAX_RECORDS = 32  # in that window
_MAX_POINTS = 512  # of a curve
_MAX_CURVES = 16  # of what a script logs
_MAX_EVENTS, _MAX_VERDICTS = 100, 50
_MAX_FILES = 256  # of ranks, at one look
_TAIL_BYTES, _ALL_TAILS_BYTES, _LEAST_TAIL_BYTES = 256 << 10, 16 << 20, 8 << 10
_HEAD_BYTES, _SHORT_HEAD_BYTES = 64 << 10, 2 << 10  # has the config of an engine, and who a rank is
_WHOLE_BYTES = 4 << 20  # more of a curve's earlier part is sampled
_NUM_SAMPLES, _SAMPLE_BYTES = 256, 4 << 10
_BRIEF_BYTES = 32 << 10  # of each file, where a job is only listed
_PROGRESS, _STEP = "progress", "step"
_OF_HEARTBEAT, _OF_SCRIPT, _OF_ENGINE = 1, 2, 3  # where a loss comes from; the last one is the best
_RARE = frozenset(LAUNCHER_RECORDS).difference((_PROGRESS, "environment"))

Points = list[tuple[float, float]]


class Curve:
    """A value over steps. Of many points neighbours are put together; a step that is done again replaces the first."""

    def __init__(self, *, is_total: bool = False) -> None:
        """is_total: a sum so far, so that the last of neighbours counts; else their mean."""
        self._points: Points = []
        self._is_total = is_total
        self._num_together = 1
        self._open: list[tuple[float, float]] = []  # the next point is of these

    def add(self, step: float, value: float) -> None:
        """Add a point; those from this step on are dropped: the job has continued from a checkpoint before them."""
        self.cut(step)
        self._open.append((step, value))
        if len(self._open) >= self._num_together:
            self._points.append(self._together(self._open))
            self._open = []
        if len(self._points) > _MAX_POINTS:
            self._points = [self._together(self._points[i : i + 2]) for i in range(0, len(self._points), 2)]
            self._num_together *= 2

    def cut(self, step: float) -> None:
        """Drop the points from a step on."""
        while self._open and self._open[-1][0] >= step:
            self._open.pop()
        while self._points and self._points[-1][0] >= step:
            self._points.pop()

    def points(self) -> Points:
        """Return steps and values, in order."""
        return [*self._points, self._together(self._open)] if self._open else list(self._points)

    def _together(self, points: Points) -> tuple[float, float]:
        value = points[-1][1] if self._is_total else sum(value for _, value in points) / len(points)
        return points[-1][0], value


@dataclass(frozen=True)
class RankView:
    """One rank, to be shown. Times in seconds; `_at_s` since the epoch."""

    rank: int
    host: str = ""
    pid: int | None = None
    has_started: bool = False
    status: int | None = None  # exit code, or minus the signal number
    is_lost: bool = False  # its host was lost
    phase: str = ""
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    steps_per_s: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None  # of one step, mean of the last ones
    phases: dict[str, float] = field(default_factory=dict)  # of one step
    memory_bytes: float | None = None
    peak_bytes: float | None = None
    heard_at_s: float | None = None
    moved_at_s: float | None = None  # when it last made progress
    least_silence_s: float = 0.0

    @property
    def own_s(self) -> float | None:
        """What a step takes without waiting for other ranks."""
        return None if self.step_s is None else max(0.0, self.step_s - self.phases.get(COMMUNICATION, 0.0))

    @property
    def is_running(self) -> bool:
        """Whether its process is there, as far as is known."""
        return self.has_started and self.status is None and not self.is_lost

    def silence_s(self, now_s: float) -> float | None:
        """Return for how long it has said nothing, or has made no step; None while that is as usual."""
        if not self.is_running or self.moved_at_s is None:
            return None
        silence_s = now_s - self.moved_at_s
        return silence_s if silence_s > max(self.least_silence_s, 3 * (self.step_s or 0.0)) else None


@dataclass(frozen=True)
class Verdict:
    """What is wrong with the job, by a rule; see `verdict` in `records`."""

    time_s: float
    name: str
    severity: str
    rank: int | None
    host: str | None
    text: str
    next: str


@dataclass(frozen=True)
class Slowest:
    """The rank that the others wait for."""

    rank: int
    own_s: float  # of a step, without waiting
    median_s: float  # of all ranks


@dataclass(frozen=True)
class JobView:
    """A job, to be shown. Times in seconds; `_at_s` since the epoch."""

    has_journal: bool = False
    job_id: str = ""
    restart: int = 0
    world_size: int = 0
    hosts: tuple[tuple[str, tuple[int, ...]], ...] = ()  # name and ranks
    started_at_s: float | None = None
    ended_at_s: float | None = None
    exit_code: int | None = None
    reason: str = ""  # of its failure
    stopping: str = ""  # why its ranks are being stopped
    step: int | None = None  # of the slowest rank that runs
    total_steps: int | None = None
    loss: float | None = None
    steps_per_s: float | None = None
    tokens_per_s: float | None = None  # of all ranks
    goodput: float | None = None  # time of steps that count, of the whole; None: not known
    slowest: Slowest | None = None
    ranks: dict[int, RankView] = field(default_factory=dict)
    curves: dict[str, Points] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()  # the newest last
    events: tuple[tuple[float, str], ...] = ()  # time and text, the newest last
    num_lost_records: int = 0

    @property
    def left_s(self) -> float | None:
        """How long the steps that are left take at this rate; None where that is not known."""
        if self.step is None or self.total_steps is None or not self.steps_per_s or self.ended_at_s is not None:
            return None
        return max(0, self.total_steps - self.step) / self.steps_per_s

    def silent(self, now_s: float) -> list[RankView]:
        """Return the ranks that say nothing, or make no step, the one that has done so for longest first."""
        if self.ended_at_s is not None:
            return []
        silent = [rank for rank in self.ranks.values() if rank.silence_s(now_s) is not None]
        return sorted(silent, key=lambda rank: rank.moved_at_s or 0.0)


class _Rank:
    """What is known of a rank while its journal is followed."""

    def __init__(self, rank: int) -> None:
        self.facts: dict[str, Any] = {"rank": rank}
        self._window: deque[tuple[int, float, float, dict[str, Any]]] = deque(maxlen=_MAX_RECORDS)
        self._progress: deque[tuple[float, int]] = deque(maxlen=_MAX_RECORDS)
        self.has_steps = False  # records of its own, and not the launcher's alone
        self.last: tuple[int, float, float] = (1, 0.0, 0.0)  # steps, seconds and tokens of the last record
        self.loss_source = 0
        self.useful_s = self.total_s = 0.0  # of steps
        self._view: RankView | None = None

    def set(self, **facts: Any) -> None:
        self.facts.update(facts)
        self._view = None

    def add_step(self, record: Record) -> None:
        """Take a record of steps."""
        num_steps = max(1, _whole(record.get("num_steps")) or 1)
        duration_s, tokens = _number(record.get("duration_s")) or 0.0, _number(record.get("tokens")) or 0.0
        phases = record.get("phases")
        self.has_steps, self.last = True, (num_steps, duration_s, tokens)
        if isinstance(phases, dict) and duration_s > 0:
            names = useful_phases(has_forward=FORWARD in phases)
            self.useful_s += sum(_number(phases.get(name)) or 0.0 for name in names)
            self.total_s += duration_s
        self._window.append((num_steps, duration_s, tokens, phases if isinstance(phases, dict) else {}))
        facts = {name: _number(record.get(name)) for name in ("memory_bytes", "peak_bytes")}
        self.set(**{name: value for name, value in facts.items() if value is not None})
        self.set_step(_whole(record.get("step")))

    def set_step(self, step: int | None) -> None:
        if step is not None:
            self.set(step=step)

    def add_progress(self, time_s: float, step: int) -> float | None:
        """Take what the launcher knows of a rank without records of its own; return its steps a second."""
        if self._progress and step <= self._progress[-1][1]:
            if step < self._progress[-1][1]:
                self._progress.clear()
            return None
        self._progress.append((time_s, step))
        self.set_step(step)
        (first_s, first), (last_s, last) = self._progress[0], self._progress[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else None

    def view(self) -> RankView:
        if self._view is None:
            self._view = RankView(**{**self.facts, **self._times()})
        return self._view

    def _times(self) -> dict[str, Any]:
        num_steps, duration_s, tokens, phases = 0, 0.0, 0.0, dict[str, float]()
        for steps, seconds, many, times in reversed(self._window):
            if num_steps and duration_s + seconds > _WINDOW_S:
                break
            num_steps, duration_s, tokens = num_steps + steps, duration_s + seconds, tokens + many
            for name, time_s in times.items():
                phases[name] = phases.get(name, 0.0) + (_number(time_s) or 0.0)
        if not num_steps or not duration_s:
            return {}
        return {
            "steps_per_s": num_steps / duration_s,
            "tokens_per_s": tokens / duration_s if tokens else None,
            "step_s": duration_s / num_steps,
            "phases": {name: time_s / num_steps for name, time_s in phases.items()},
        }


class LiveJob:
    """Follows a job. `look` is for one thread at a time; what it returns does not change."""

    def __init__(self, run_folder: Path, *, is_brief: bool = False) -> None:
        """is_brief: read little, for a list of jobs; one rank speaks for all."""
        self._journal = JobJournal(run_folder)
        self._is_brief = is_brief
        self._try: TryJournal | None = None
        self._started: dict[int, int] = {}  # rank -> where in its file the first look began
        self._num_looks = self._turn = 0
        self._curves: dict[str, Curve] = {}
        self._useful: Curve | None = Curve(
            is_total=True
        )  # seconds of steps that were not done again; None: not all was read
        self._events: deque[tuple[float, str]] = deque(maxlen=_MAX_EVENTS)
        self._first_start_s: float | None = None
        self._now_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._job: dict[str, Any] = {}
        self._ranks: dict[int, _Rank] = {}
        self._verdicts: dict[tuple[object, ...], Verdict] = {}
        self._loss_rank: int | None = None
        self._rate_rank: int | None = None  # whose records of steps are the curve of the rate
        self._beating_rank: int | None = None  # whose heartbeats are, as long as there are no such records
        self._loss_source = 0
        self._data_fraction = 1.0  # ranks with samples of their own, of all ranks
        self._started = {}
        self._num_lost = 0

    def look(self, now_s: float, wanted: Collection[int] = (), *, reads_all: bool = False) -> JobView:
        """Read what is new and return the job as it is now.

        now_s: seconds since the epoch. wanted: ranks that are read at every look. reads_all: not some ranks in turn.
        """
        self._now_s = now_s
        is_complete = self._try is not None and len(self._try.ranks) >= len(self._ranks)
        if self._num_looks % 4 == 0 or not is_complete or "ended_at_s" in self._job:
            self._journal.look()
        self._num_looks += 1
        tries = [each for each in self._journal.tries if each.launcher.path.exists() or each.ranks]
        if self._is_brief:
            tries = tries[-1:]
        known = tries.index(self._try) if self._try in tries else -1
        for each in tries[max(known, 0) :]:
            if each is not self._try:
                self._reset()
                self._try = each
                self._read_launcher_first(each.launcher)
            is_last = each is tries[-1]
            for record in each.launcher.poll():
                self._take(record)
            self._read_ranks(each, wanted, reads_all=reads_all or not is_last)
        return self._view()

    # ---- reading ----

    def _read_launcher_first(self, file: JournalFile) -> None:
        """Read the launcher's file up to near its end: all that is rare, and of the rest the last."""
        size = file.size_bytes
        tail_bytes = _BRIEF_BYTES if self._is_brief else _WHOLE_BYTES
        if size <= tail_bytes:
            return
        if self._is_brief:
            for record in file.peek(0, _BRIEF_BYTES):
                self._take(record)
        else:
            whole = JournalFile(file.path)
            for record in whole.poll(_RARE):
                self._take(record)
        for record in self._sampled(file, size - tail_bytes):
            if record["kind"] == _PROGRESS:
                self._take(record)
        file.start_near_end(tail_bytes)

    def _sampled(self, file: JournalFile, end: int) -> Iterator[Record]:
        """Yield records of the file up to `end`: all of a small part, else some from everywhere."""
        if self._is_brief:
            return
        if end <= _WHOLE_BYTES:
            yield from file.peek(0, end)
            return
        for number in range(_NUM_SAMPLES):
            records = list(file.peek(end * number // _NUM_SAMPLES, _SAMPLE_BYTES))
            yield from records[:1] or ()

    def _read_ranks(self, each: TryJournal, wanted: Collection[int], *, reads_all: bool) -> None:
        numbers = list(each.ranks)
        if self._is_brief:
            numbers = numbers[:1]
        elif not reads_all and len(numbers) > _MAX_FILES:
            first = self._turn % len(numbers)
            self._turn += _MAX_FILES
            in_turn = (numbers[first:] + numbers[:first])[:_MAX_FILES]
            always = [rank for rank in (self._loss_rank, self._rate_rank, *wanted) if rank in each.ranks]
            numbers = list(dict.fromkeys([*always, *in_turn]))
        tail_bytes = min(_TAIL_BYTES, max(_LEAST_TAIL_BYTES, _ALL_TAILS_BYTES // max(1, len(each.ranks))))
        for number in numbers:
            file = each.ranks[number]
            if number not in self._started:
                start = file.start_near_end(_BRIEF_BYTES if self._is_brief else tail_bytes)
                self._started[number] = start
                head_bytes = _HEAD_BYTES if number == numbers[0] else _SHORT_HEAD_BYTES
                for record in file.peek(0, min(start, head_bytes)):
                    if record["kind"] in ("rank", "engine"):
                        self._take_of_rank(number, record)
            for record in file.poll():
                self._take_of_rank(number, record)

    def _begin_curves(self, rank: int) -> None:
        """Read what of a rank's file was skipped, for its curves."""
        start = self._started.get(rank, 0)
        if not start or self._try is None:
            return
        if start > _WHOLE_BYTES or self._is_brief:
            self._useful = None
        for record in self._sampled(self._try.ranks[rank], start):
            if record["kind"] == _STEP:
                earlier = _Rank(rank)
                earlier.add_step(record)
                self._add_to_curves(rank, earlier, record)

    # ---- records of the launcher ----

    def _take(self, record: Record) -> None:
        kind, time_s = record["kind"], _number(record.get("time_s")) or self._now_s
        rank = _whole(record.get("rank"))
        if kind == "job":
            self._take_job(record, time_s)
        elif kind == _PROGRESS:
            self._take_progress(record, time_s)
        elif kind == "start" and rank is not None:
            more = {name: record[name] for name in ("host", "pid") if record.get(name) is not None}
            self._of(rank).set(has_started=True, phase=STARTING, **more)
            self._hear(rank, time_s)
        elif kind == "exit" and rank is not None:
            status = _whole(record.get("status"))
            if self._of(rank).facts.get("status") is None and status:
                self._note(time_s, f"rank {rank} ended with {status}")
            self._of(rank).set(status=status, has_started=True)
            self._hear(rank, time_s)
        elif kind == "raised":
            self._note(time_s, f"rank {rank} raised {record.get('type')}: {record.get('message')}")
        elif kind == "host_lost":
            self._note(time_s, f"{record.get('host')} was lost: {record.get('reason')}")
            for each in self._ranks.values():
                if each.facts.get("host") == record.get("host"):
                    each.set(is_lost=True)
        elif kind == "notice":
            self._note(time_s, str(record.get("text")))
        elif kind == "stopping":
            self._job["stopping"] = str(record.get("text"))
            self._note(time_s, f"the ranks are stopped: {record.get('text')}")
        elif kind == "verdict":
            self._take_verdict(record, time_s)
        elif kind == "end":
            failure = record.get("failure")
            reason = str(failure.get("reason") or "") if isinstance(failure, dict) else ""
            self._job |= {"ended_at_s": time_s, "exit_code": _whole(record.get("exit_code")), "reason": reason}
            self._note(time_s, f"the run ended with {self._job['exit_code']}" + (f": {reason}" if reason else ""))

    def _take_job(self, record: Record, time_s: float) -> None:
        hosts = []
        for host in _list(record.get("hosts")):
            if isinstance(host, dict):
                ranks = [rank for rank in map(_whole, _list(host.get("ranks"))) if rank is not None]
                hosts.append((str(host.get("name")), tuple(ranks)))
                for rank in ranks:
                    self._of(rank).set(host=str(host.get("name")))
        restart = _whole(record.get("restart")) or 0
        self._job |= {
            "job_id": str(record.get("job_id")),
            "restart": restart,
            "world_size": _whole(record.get("world_size")) or 0,
            "hosts": tuple(hosts),
        }
        self._first_start_s = self._first_start_s or time_s
        if restart and not any(text == f"restart {restart}" for _, text in self._events):
            self._note(time_s, f"restart {restart}")

    def _take_progress(self, record: Record, time_s: float) -> None:
        for news in _list(record.get("ranks")):
            number = _whole(news[0]) if isinstance(news, list) and len(news) >= 6 else None
            if number is None:
                continue
            heartbeats, step, loss, phase, total_steps = news[1:6]
            rank = self._of(number)
            step = _whole(step) if _whole(step) is not None else _whole(heartbeats) or None
            rank.set(has_started=True, phase=str(phase or ""), total_steps=_whole(total_steps))
            self._hear(number, time_s)
            if rank.has_steps and step is not None:
                rank.set_step(max(step, rank.facts.get("step", step)))
            elif step is not None:
                rate = rank.add_progress(time_s, step)
                if rate is not None:
                    rank.set(steps_per_s=rate)
                    if self._beating_rank in (None, number) and self._rate_rank is None:
                        self._beating_rank = number
                        self._curve(STEPS_PER_S).add(step, rate)
            value = _number(loss)
            if value is not None:
                self._take_loss(number, step, value, _OF_HEARTBEAT)

    def _take_verdict(self, record: Record, time_s: float) -> None:
        rank, host = _whole(record.get("rank")), record.get("host")
        host = host if isinstance(host, str) else None
        texts = {name: str(record.get(name) or "") for name in ("name", "severity", "text", "next")}
        key = (texts["name"], rank, host)
        self._verdicts.pop(key, None)
        if record.get("until_step") is not None:  # it is so no longer
            return
        self._verdicts[key] = Verdict(time_s=time_s, rank=rank, host=host, **texts)
        if len(self._verdicts) > _MAX_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]

    # ---- records of ranks ----

    def _take_of_rank(self, number: int, record: Record) -> None:
        kind, time_s, rank = record["kind"], _number(record.get("time_s")) or self._now_s, self._of(number)
        if kind == _STEP:
            rank.add_step(record)
            if self._rate_rank is None or self._rate_rank == number or _is_number(record.get("loss")):
                self._add_to_curves(number, rank, record)
            self._hear(number, time_s)
            return
        self._hear(number, time_s, is_progress=kind not in ("sample", "dropped"))
        if kind == "rank":
            rank.set(has_started=True, pid=_whole(record.get("pid")))
            if not rank.facts.get("host"):
                rank.set(host=str(record.get("host") or ""))
        elif kind == "engine":
            self._data_fraction = _data_fraction(record.get("config"), self._job.get("world_size", 0))
        elif kind == "dropped":
            self._num_lost += _whole(record.get("num_records")) or 0
        elif kind == "log" and isinstance(record.get("values"), dict):
            self._take_logged(number, record["values"])

    def _add_to_curves(self, number: int, rank: _Rank, record: Record) -> None:
        step = _whole(record.get("step"))
        if step is None:
            return
        if self._rate_rank is None:
            self._rate_rank = number
            if self._beating_rank is not None:
                self._curves.pop(STEPS_PER_S, None)
            self._begin_curves(number)
        num_steps, duration_s, tokens = rank.last
        if self._rate_rank == number and duration_s > 0:
            self._curve(STEPS_PER_S).add(step, num_steps / duration_s)
            if tokens:
                scale = self._data_fraction * max(1, self._job.get("world_size", 1))
                self._curve(TOKENS_PER_S).add(step, tokens / duration_s * scale)
            if self._useful is not None:
                self._useful.cut(step - num_steps + 1)
                points = self._useful.points()[-1:]
                self._useful.add(step, (points[0][1] if points else 0.0) + duration_s)
        loss = _number(record.get("loss"))
        if loss is not None:
            if self._loss_source < _OF_ENGINE:
                self._take_loss_from(number, _OF_ENGINE)
                if number != self._rate_rank:
                    self._begin_curves(number)
            self._take_loss(number, step, loss, _OF_ENGINE)

    def _useful_share(self) -> float:
        """Return which part of a step trains: the mean over ranks, of all that was read."""
        shares = [rank.useful_s / rank.total_s for rank in self._ranks.values() if rank.total_s]
        return sum(shares) / len(shares) if shares else 0.0

    def _take_loss(self, number: int, step: int | None, loss: float, source: int) -> None:
        """Take a loss, unless there is a better source: one rank's, and the engine's before the script's."""
        rank = self._of(number)
        if source >= rank.loss_source:
            rank.loss_source = source
            rank.set(loss=loss)
        if source > self._loss_source:
            self._take_loss_from(number, source)
        if source == self._loss_source and number == self._loss_rank:
            self._job["loss"] = loss
            if step is not None and math.isfinite(loss):
                self._curve(LOSS).add(step, loss)

    def _take_loss_from(self, number: int, source: int) -> None:
        if self._loss_source:
            self._curves.pop(LOSS, None)
        self._loss_source, self._loss_rank = source, number

    def _take_logged(self, number: int, values: dict[str, Any]) -> None:
        step = _whole(values.get(_STEP))
        step = self._of(number).facts.get("step") if step is None else step
        for name, value in values.items():
            logged = _number(value)
            if name == LOSS and logged is not None:
                self._take_loss(number, step, logged, _OF_SCRIPT)
            elif name != _STEP and logged is not None and math.isfinite(logged):
                has_room = name in self._curves or len(self._curves) < _MAX_CURVES
                if has_room and step is not None and number == min(self._ranks):
                    self._curve(name).add(step, logged)

    # ---- what is shown ----

    def _of(self, number: int) -> _Rank:
        rank = self._ranks.get(number)
        if rank is None:
            rank = self._ranks[number] = _Rank(number)
        return rank

    def _hear(self, number: int, time_s: float, *, is_progress: bool = True) -> None:
        # Another host's clock may be wrong: what comes while we look is heard now.
        heard_s = self._now_s if self._num_looks > 1 else min(time_s, self._now_s)
        self._of(number).set(heard_at_s=heard_s, **({"moved_at_s": heard_s} if is_progress else {}))

    def _curve(self, name: str) -> Curve:
        return self._curves.setdefault(name, Curve())

    def _note(self, time_s: float, text: str) -> None:
        self._events.append((time_s, text))

    def _view(self) -> JobView:
        if self._try is None:
            return JobView()
        world_size = self._job.get("world_size", 0) or len(self._ranks)
        for rank in self._ranks.values():
            rank.facts["least_silence_s"] = max(_SILENCE_S, 3 * world_size / _RANKS_A_SECOND)
        ranks = {number: self._ranks[number].view() for number in sorted(self._ranks)}
        facts = {**self._job, "world_size": world_size, "started_at_s": self._first_start_s}
        return JobView(
            has_journal=True,
            ranks=ranks,
            curves={name: points for name, curve in self._curves.items() if (points := curve.points())},
            verdicts=tuple(self._verdicts.values()),
            events=tuple(sorted(self._events)),
            num_lost_records=self._num_lost,
            slowest=_slowest(ranks.values()),
            goodput=self._goodput(),
            **{**_pace(ranks.values(), world_size, self._data_fraction), **facts},
        )

    def _goodput(self) -> float | None:
        points = self._useful.points() if self._useful is not None else []
        if not points or self._first_start_s is None:
            return None
        end_s = self._job.get("ended_at_s") or self._now_s
        wall_s = max(points[-1][1], end_s - self._first_start_s, 1e-9)
        return min(1.0, points[-1][1] * self._useful_share() / wall_s)


def shown_phase(rank: RankView, now_s: float) -> str:
    """Return what a running rank does. Between two steps of a steady pace it is still training."""
    if rank.phase == BETWEEN_STEPS and rank.silence_s(now_s) is None:
        return TRAINING
    return rank.phase or "running"


def _pace(ranks: Iterable[RankView], world_size: int, data_fraction: float) -> dict[str, Any]:
    """Return step and rates: of the slowest rank that still runs; of all when none does."""
    counting = [rank for rank in ranks if rank.step is not None]
    counting = [rank for rank in counting if rank.is_running] or counting
    if not counting:
        return {}
    last = min(counting, key=lambda rank: rank.step or 0)
    tokens = [rank.tokens_per_s for rank in counting if rank.tokens_per_s]
    return {
        "step": last.step,
        "total_steps": next((rank.total_steps for rank in counting if rank.total_steps), None),
        "steps_per_s": min((rank.steps_per_s for rank in counting if rank.steps_per_s), default=None),
        "tokens_per_s": statistics.fmean(tokens) * world_size * data_fraction if tokens else None,
    }


def _slowest(ranks: Iterable[RankView]) -> Slowest | None:
    own = {rank.rank: rank.own_s for rank in ranks if rank.own_s is not None and not rank.status}
    if len(own) < 2:
        return None
    number = max(own, key=lambda rank: own[rank])
    others = [time_s for rank, time_s in own.items() if rank != number]
    median_s = statistics.median(others)
    return Slowest(number, own[number], median_s) if own[number] > SLOW_FACTOR * median_s else None


def _data_fraction(config: object, world_size: int) -> float:
    """Return how many ranks of all have samples of their own: ranks of one model replica read the same."""
    if isinstance(config, dict):
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        batch, micro, accumulation = (_number(config.get(name)) for name in names)
        if batch and micro and accumulation and world_size:
            return min(1.0, batch / (micro * accumulation) / world_size)
    return 1.0


def _is_number(value: object) -> bool:
    return _number(value) is not None


def _number(value: object) -> float | None:
    """Return a number of a record, NaN and infinity too; None for anything else."""
    if value in ("nan", "inf", "-inf"):
        return float(str(value))
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
