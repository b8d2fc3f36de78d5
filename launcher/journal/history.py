"""The whole journal of a job as columns: all its starts, each rank's steps, and what the launcher saw.

For `launch show` and `launch report`. No torch, and nothing but the standard library. A journal that is larger than
asked for is sampled: its head, its tail, and blocks between them at even distances. Damaged lines, and a last line that
is cut off, are skipped. All times are those of the launcher's clock, whatever the clocks of the hosts say.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.journal.read import JobJournal, Record, TryJournal
from launcher.journal.records import PHASES, RANK_RECORDS

NAN = math.nan
# The numbers of `step` records, a column each, beside those of the phases.
NUMBERS = tuple(name for name in RANK_RECORDS["step"] if name != "phases")

_BLOCK_BYTES = 64 << 10  # of a sample
_LEAST_BLOCK_BYTES = 4 << 10  # some records
_READ_BYTES = 1 << 20  # of a file that is read whole
_MAX_SAMPLED_RANKS = 256  # more files than this take longer to open than to read
_RECORD = b'{"kind":"'
_STEP = b'{"kind":"step"'
# Nothing here needs them, and a long job has many.
_UNREAD_OF_LAUNCHER = b'{"kind":"progress"'
_BEYOND_NUMBERS = 1e15  # no time, and no count of steps


@dataclass
class RankHistory:
    """One rank in one start of the job."""

    rank: int
    columns: dict[str, array[float]] = field(default_factory=dict)  # NUMBERS and PHASES; NaN: not in the record
    records: list[Record] = field(default_factory=list)  # all others
    num_bytes: int = 0
    num_read_bytes: int = 0
    is_sample: bool = False  # parts of the file were left out
    num_damaged: int = 0  # lines that are no record
    first_nonfinite_loss: float | None = None  # number of the first step whose loss was NaN or infinite

    def __len__(self) -> int:
        return len(self.columns["step"]) if self.columns else 0

    @property
    def weight(self) -> float:
        """How many records each one stands for: 1, or more in a sample."""
        return self.num_bytes / self.num_read_bytes if self.is_sample and self.num_read_bytes else 1.0

    @property
    def has_engine(self) -> bool:
        """Whether the engine wrote the steps, which counts them through restarts and measures waiting."""
        return any(not math.isnan(value) for value in self.columns.get("samples", ()))

    def of_kind(self, kind: str) -> list[Record]:
        """Return the records of a kind, in order."""
        return [record for record in self.records if record["kind"] == kind]


@dataclass
class Start:
    """One start of the job: the first one, or a restart."""

    number: int
    folder: Path
    job: Record = field(default_factory=dict)
    environment: Record = field(default_factory=dict)
    events: list[Record] = field(default_factory=list)  # of the launcher, without those above, clocks and progress
    ranks: dict[int, RankHistory] = field(default_factory=dict)
    num_ranks: int = 0  # that have a file; a sample of a large job has fewer
    kept_until: float = math.inf  # steps after this number were done again by a later start

    @property
    def begun_s(self) -> float | None:
        """When the launcher began it, else when the first record was written; None without any."""
        return self.job.get("time_s") or min(self._times(), default=None)

    @property
    def ended_s(self) -> float | None:
        """When it ended, else when the last record was written; None without any."""
        return max(self._times(), default=None)

    @property
    def end(self) -> Record | None:
        """The launcher's last record; None while it runs, or where the launcher was killed."""
        return next((event for event in reversed(self.events) if event["kind"] == "end"), None)

    def kept_share(self, step: float, num_steps: float) -> float:
        """Return how much of a record of so many steps, the last of this number, was not done again."""
        if step <= self.kept_until or math.isnan(step):
            return 1.0
        return max(0.0, 1.0 - (step - self.kept_until) / max(1.0, num_steps))

    def host_of(self, rank: int) -> str | None:
        """Return the name of a rank's host as the job names it."""
        for host in _records_in(self.job.get("hosts")):
            ranks = host.get("ranks")
            if isinstance(ranks, list) and rank in ranks:
                return str(host.get("name"))
        return None

    def _times(self) -> Iterator[float]:
        for record in (self.job, self.environment, *self.events):
            if "time_s" in record:
                yield record["time_s"]
        for rank in self.ranks.values():
            yield from (rank.columns["time_s"][place] for place in ((0, -1) if len(rank) else ()))
            yield from (record["time_s"] for record in rank.records if "time_s" in record)


@dataclass
class History:
    """The journal of a job, read once."""

    run_folder: Path
    starts: list[Start]
    report: dict[str, Any] | None  # `report.json`, which the launcher leaves at the end

    @property
    def is_sample(self) -> bool:
        """Whether parts of the journal were left out."""
        return any(start.num_ranks > len(start.ranks) for start in self.starts) or any(
            rank.is_sample for rank in self.ranks()
        )

    @property
    def num_damaged(self) -> int:
        """How many lines of ranks were no records."""
        return sum(rank.num_damaged for rank in self.ranks())

    @property
    def job(self) -> Record:
        """What the launcher wrote first of the last start that it began; empty without it."""
        return next((start.job for start in reversed(self.starts) if start.job), {})

    @property
    def environment(self) -> Record:
        """The environment of the last start that has one; empty without it."""
        return next((start.environment for start in reversed(self.starts) if start.environment), {})

    @property
    def begun_s(self) -> float | None:
        """When the job began."""
        return min((start.begun_s for start in self.starts if start.begun_s is not None), default=None)

    @property
    def ended_s(self) -> float | None:
        """When it ended, or the last sign of it."""
        return max((start.ended_s for start in self.starts if start.ended_s is not None), default=None)

    @property
    def engine(self) -> Record:
        """What an engine of the job said of itself, the last start's; empty without one."""
        for start in reversed(self.starts):
            for rank in start.ranks.values():
                if found := rank.of_kind("engine"):
                    return found[-1]
        return {}

    def events(self, *kinds: str) -> list[Record]:
        """Return the launcher's events, of these kinds or of all, in order."""
        return [event for start in self.starts for event in start.events if not kinds or event["kind"] in kinds]

    def ranks(self) -> Iterator[RankHistory]:
        """Yield each rank of each start."""
        for start in self.starts:
            yield from start.ranks.values()


def read_history(run_folder: Path, max_bytes: int | None = None) -> History:
    """Read the journal of a job. max_bytes: read about as much of the ranks' files at most; None: all of them.

    Whatever is missing or damaged is left out: a folder without a journal has starts without records.
    """
    journal = JobJournal(run_folder)
    per_start = None if max_bytes is None else max_bytes // max(1, len(journal.tries))
    starts = [_read_start(each, per_start) for each in journal.tries]
    _place_steps(starts)
    return History(run_folder, starts, _report_of(run_folder))


def _report_of(run_folder: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        report = json.loads((run_folder / "report.json").read_bytes())
        return report if isinstance(report, dict) else None
    return None


# ---- files ----


def _read_start(journal: TryJournal, max_bytes: int | None) -> Start:
    _, _, number = journal.folder.name.partition("restart_")
    start = Start(int(number) if number.isdigit() else 0, journal.folder)
    offsets: dict[str, list[float]] = {}
    for block in _blocks(journal.launcher.path):
        lines = [line for line in block if not line.startswith(_UNREAD_OF_LAUNCHER)]
        for record in _records(lines)[0]:
            if not _is_finite(record.get("time_s")):
                continue
            if record["kind"] == "job":
                start.job = record
            elif record["kind"] == "environment":
                start.environment = record
            elif record["kind"] == "clock":
                if _is_finite(record.get("offset_s")):
                    offsets.setdefault(str(record.get("host")), []).append(record["offset_s"])
            else:
                start.events.append(record)
    paths = [(rank, file.path) for rank, file in journal.ranks.items()]
    start.num_ranks = len(paths)
    if max_bytes is not None and len(paths) > _MAX_SAMPLED_RANKS:
        last = len(paths) - 1
        paths = [paths[place * last // (_MAX_SAMPLED_RANKS - 1)] for place in range(_MAX_SAMPLED_RANKS)]
    for rank, path in paths:
        budget = None if max_bytes is None else max_bytes // len(paths)
        start.ranks[rank] = _read_rank(rank, path, budget, is_first=rank == paths[0][0])
    for each in start.ranks.values():
        _use_clock_of_launcher(start, each, offsets)
    return start


def _read_rank(rank: int, path: Path, max_bytes: int | None, *, is_first: bool) -> RankHistory:
    found = RankHistory(rank)
    with contextlib.suppress(OSError):
        found.num_bytes = path.stat().st_size
    found.is_sample = _is_sampled(found.num_bytes, max_bytes)
    # The record of the engine is long where a model has many units; that of one rank is enough.
    for block in _blocks(path, max_bytes, ends_head=is_first):
        found.num_read_bytes += sum(map(len, block)) + len(block)
        steps = [line for line in block if line.startswith(_STEP)]
        records, num_damaged = _records([line for line in block if not line.startswith(_STEP)])
        found.records += [record for record in records if _is_finite(record.get("time_s"))]
        found.num_damaged += num_damaged
        records, num_damaged = _records(steps)
        found.num_damaged += num_damaged
        _add_steps(found, records)
    return found


def _blocks(path: Path, max_bytes: int | None = None, *, ends_head: bool = False) -> Iterator[list[bytes]]:
    """Yield whole lines of a file, block by block. A file that is larger than max_bytes is sampled.

    ends_head: read the last line of the first block to its end, however long it is.
    """
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        size = file.seek(0, 2)
        file.seek(0)
        if not _is_sampled(size, max_bytes):
            rest = b""
            while data := file.read(_READ_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                yield lines
            return
        assert max_bytes is not None
        length = max(_LEAST_BLOCK_BYTES, min(_BLOCK_BYTES, max_bytes // 2))
        num_blocks = max(2, max_bytes // length)
        for place in range(num_blocks):
            begin = (size - length) * place // (num_blocks - 1)
            file.seek(begin)
            data = file.read(length)
            if not begin and ends_head:
                data += file.readline()
            *lines, _ = data.split(b"\n")
            yield lines[1:] if begin else lines  # the first one began before the block


def _is_sampled(size: int, max_bytes: int | None) -> bool:
    return max_bytes is not None and size > max(max_bytes, 2 * _LEAST_BLOCK_BYTES)


def _records(lines: list[bytes]) -> tuple[list[Record], int]:
    """Return the records of lines, and how many lines are none. Many are read as one array, which is quicker."""
    whole = [line for line in lines if line.startswith(_RECORD) and line.endswith(b"}")]
    num_damaged = len(lines) - len(whole) - lines.count(b"")
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(b"[" + b",".join(whole) + b"]")
        if len(found) == len(whole):
            return [record for record in found if isinstance(record.get("kind"), str)], num_damaged
    records = []
    for line in whole:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record["kind"], str):
                records.append(record)
    return records, num_damaged + len(whole) - len(records)


# ---- columns ----


def _add_steps(rank: RankHistory, records: list[Record]) -> None:
    """Add step records to the columns; those without number, time and duration are damaged."""
    sound = _sound(records)
    rank.num_damaged += len(records) - len(sound)
    if not rank.columns:
        rank.columns = {name: array("d") for name in (*NUMBERS, *PHASES)}
    for name in NUMBERS:
        values = [record.get(name) for record in sound]
        _extend(rank.columns[name], [NAN if value is None else value for value in values])
    phases = [each if isinstance(each, dict) else {} for each in [record.get("phases") for record in sound]]
    for name in PHASES:
        _extend(rank.columns[name], [times.get(name, 0.0) for times in phases])
    if rank.first_nonfinite_loss is None:
        numbers = (record["step"] for record in sound if isinstance(record.get("loss"), str))
        rank.first_nonfinite_loss = next(numbers, None)


def _sound(records: list[Record]) -> list[Record]:
    """Return the step records that have numbers where each must have one."""
    most = _BEYOND_NUMBERS
    try:
        return [
            record
            for record in records
            if -most < record["time_s"] < most
            and -most < record["step"] < most
            and 1 <= record["num_steps"] < most
            and 0 <= record["duration_s"] < most
        ]
    except (KeyError, TypeError):
        return [] if len(records) == 1 else [found for record in records for found in _sound([record])]


def _extend(column: array[float], values: list[Any]) -> None:
    """Add values to a column, all at once where all are numbers."""
    num_before = len(column)
    try:
        column.extend(values)
    except (TypeError, OverflowError):
        del column[num_before:]
        column.extend(map(_number, values))


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < _BEYOND_NUMBERS


def _number(value: Any) -> float:
    """Return a number of a record: NaN and infinity are texts there, and what is not known is null."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return float(value)
    return NAN


def _records_in(value: Any) -> list[Record]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _use_clock_of_launcher(start: Start, rank: RankHistory, offsets: dict[str, list[float]]) -> None:
    """Bring the times of a rank to the launcher's clock: host's time -> host's monotonic -> launcher's -> its time."""
    heads, launcher = rank.of_kind("rank"), start.job
    host_offsets = offsets.get(start.host_of(rank.rank) or "")
    monotonics = [record.get("monotonic_s") for record in (*heads[:1], launcher)]
    if not heads or not host_offsets or not all(map(_is_finite, monotonics)):
        return  # one clock, as far as is known
    of_host, of_launcher = monotonics[0] - heads[0]["time_s"], monotonics[1] - launcher["time_s"]
    shift_s = of_host + statistics.median(host_offsets) - of_launcher
    for record in rank.records:
        record["time_s"] += shift_s
    if rank.columns:
        rank.columns["time_s"] = array("d", [time_s + shift_s for time_s in rank.columns["time_s"]])


def _place_steps(starts: list[Start]) -> None:
    """Continue the numbers of steps through restarts, and note which steps were done again.

    Only the engine's numbers tell which step of the training a step is: without it each start counts from 1, and what
    a script did again is not known.
    """
    num_before = 0.0
    for start in starts:
        ranks = [rank for rank in start.ranks.values() if len(rank)]
        if not ranks:
            continue
        if not any(rank.has_engine for rank in ranks):
            for rank in ranks:
                rank.columns["step"] = array("d", [step + num_before for step in rank.columns["step"]])
        num_before = max(rank.columns["step"][-1] for rank in ranks)
    first_of_later = math.inf
    for start in reversed(starts):
        start.kept_until = first_of_later - 1
        firsts = (r.columns["step"][0] - r.columns["num_steps"][0] + 1 for r in start.ranks.values() if len(r))
        first_of_later = min(first_of_later, *firsts, math.inf)
