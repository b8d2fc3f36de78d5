"""Put the traces of several ranks into one file that Perfetto and chrome://tracing open, on one clock. No torch.

A rank's answer is a line, the head, and a compressed trace: a line of facts (its clocks, its steps, the changes of
phase) and what torch's profiler has written. Each rank becomes a process with two tracks more, its steps and the phases
of the journal, above those of its threads and streams. The launcher is a process, too: what it saw is marked there.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from launcher.base.errors import LauncherError
from launcher.journal.trace_request import MAX_HEAD_BYTES, AnswerHead, parsed_head

Event = dict[str, Any]

_GZIP_LEVEL = 5
_LAUNCHER_PID, _PIDS_A_RANK = 1, 1000  # in the file: those of several hosts may be the same
_STEPS_TID, _PHASES_TID = 1 << 30, (1 << 30) + 1  # no thread has such a number
MARKED = ("notice", "stopping", "stacks", "raised", "exit", "host_lost", "verdict", "save", "nonfinite")
_SHOWN = ("text", "message", "reason", "path", "module")  # what a mark says, the first that a record has


@dataclass(frozen=True)
class RankTrace:
    """One rank's trace."""

    rank: int
    host: str
    path: Path  # of its answer
    wall_minus_clock_s: float  # our wall clock minus the monotonic clock of its host


@dataclass(frozen=True)
class MergedTrace:
    """What is in the file."""

    first_step: int
    last_step: int
    common_steps: int  # that all ranks have
    num_bytes: int


def read_head(path: Path) -> AnswerHead | None:
    """Return the head of an answer; None where there is none yet."""
    try:
        with path.open("rb") as file:
            return parsed_head(file.readline(MAX_HEAD_BYTES))
    except OSError:
        return None


def merge_traces(target: Path, traces: Sequence[RankTrace], launcher_records: Iterable[Event]) -> MergedTrace:
    """Write one file, compressed where its name ends in .gz. One rank after the other is in memory.

    launcher_records: of the journal; those within the time of the trace are marked. Raises: OSError, and LauncherError
    for a trace that is damaged.
    """
    part = target.with_name(f".{target.name}.part")
    spans: list[tuple[float, float]] = []  # begin and end of each rank's trace, in microseconds of the file
    steps: list[set[int]] = []
    zero_ns: int | None = None  # of the file, by our wall clock
    try:
        with gzip.open(part, "wt", _GZIP_LEVEL) if target.suffix == ".gz" else part.open("w") as file:
            write = _begun(file)
            for place, trace in enumerate(sorted(traces, key=lambda trace: trace.rank)):
                facts, profile = _loaded(trace)
                shift_ns = round(1e9 * trace.wall_minus_clock_s) - (facts["time_ns"] - facts["monotonic_ns"])
                ends_ns = [time_ns + shift_ns for _, time_ns in facts["steps"]]
                zero_ns = ends_ns[0] if zero_ns is None else zero_ns
                for event in _events_of(trace, place, len(traces), facts, profile, shift_ns - zero_ns):
                    write(event)
                spans.append(((ends_ns[0] - zero_ns) / 1e3, (ends_ns[-1] - zero_ns) / 1e3))
                steps.append({step for step, _ in facts["steps"][1:]})
            begin_us, end_us = min(begin for begin, _ in spans), max(end for _, end in spans)
            for event in _marks(launcher_records, begin_us, end_us, (zero_ns or 0) / 1e3):
                write(event)
            file.write(f'\n], "baseTimeNanoseconds": {zero_ns}}}\n')
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
    every = set().union(*steps)
    return MergedTrace(min(every), max(every), len(set.intersection(*steps)), target.stat().st_size)


def _begun(file: TextIO) -> Callable[[Event], None]:
    """Write the beginning of a file; return what writes an event."""
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    separator = "\n"

    def write(event: Event) -> None:
        nonlocal separator
        file.write(separator + json.dumps(event, separators=(",", ":")))
        separator = ",\n"

    return write


def _loaded(trace: RankTrace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts and the profile of a rank. Raises: LauncherError."""
    try:
        with trace.path.open("rb") as file:
            file.readline(MAX_HEAD_BYTES)
            with gzip.open(file) as content:
                facts = json.loads(content.readline())
                # What JSON has not (NaN) is a text from here on: other readers refuse it.
                profile = json.loads(content.read(), parse_constant=str)
        is_sound = len(facts["steps"]) > 1 and isinstance(profile["traceEvents"], list)
        float(facts["time_ns"] - facts["monotonic_ns"] + profile.get("baseTimeNanoseconds", 0))
    except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LauncherError(f"the trace of rank {trace.rank} is damaged: {error!r:.200}", where=trace.host) from None
    if not is_sound:
        raise LauncherError(f"the trace of rank {trace.rank} is empty", where=trace.host)
    return facts, profile


def _events_of(
    trace: RankTrace, place: int, num_ranks: int, facts: dict[str, Any], profile: dict[str, Any], shift_ns: int
) -> Iterator[Event]:
    """Yield the events of a rank. place: among the ranks of the file. shift_ns: from its wall clock to the file's."""
    first_pid = _PIDS_A_RANK * (place + 1)
    name = f"rank {trace.rank} ({trace.host})"
    yield from _process(first_pid, name, first_pid)
    yield from _track(first_pid, _STEPS_TID, "steps", -2)
    yield from _track(first_pid, _PHASES_TID, "phases", -1)
    for (_, begin_ns), (step, end_ns) in itertools.pairwise(facts["steps"]):
        yield _slice(first_pid, _STEPS_TID, f"step {step}", begin_ns + shift_ns, end_ns + shift_ns)
    ends = [time_ns for time_ns, _ in facts["phases"][1:]] + [facts["steps"][-1][1]]
    for (begin_ns, phase), end_ns in zip(facts["phases"], ends, strict=False):
        if end_ns > begin_ns:
            yield _slice(first_pid, _PHASES_TID, phase, begin_ns + shift_ns, end_ns + shift_ns)
    base_us = (profile.get("baseTimeNanoseconds", 0) + shift_ns) / 1e3
    pids: dict[Any, int] = {facts["pid"]: first_pid}
    for event in profile["traceEvents"]:
        pid = event.get("pid")
        if not isinstance(pid, int):  # "Spans", "Traces": the profiler itself
            continue
        if event["ph"] == "M" and event["name"].startswith("process_"):
            continue
        if pid not in pids:  # the profiler gives each device a process
            pids[pid] = first_pid + len(pids)
            yield from _process(pids[pid], f"rank {trace.rank} device {pid}", pids[pid])
        event["pid"] = pids[pid]
        if "id" in event and isinstance(event["id"], int):  # of arrows: those of ranks must not meet
            event["id"] = event["id"] * num_ranks + place
        event["ts"] = round(event.get("ts", 0.0) + base_us, 3)
        yield event


def _marks(records: Iterable[Event], begin_us: float, end_us: float, zero_us: float) -> Iterator[Event]:
    """Yield what the launcher noted meanwhile. zero_us: of the file, by our wall clock."""
    yield from _process(_LAUNCHER_PID, "launch", 0)
    for record in records:
        time_us = 1e6 * record.get("time_s", 0.0) - zero_us
        if record["kind"] in MARKED and begin_us <= time_us <= end_us:
            said = next((str(record[key]) for key in _SHOWN if record.get(key)), "")
            rank = f" of rank {record['rank']}" if record.get("rank") is not None else ""
            name = f"{record['kind']}{rank}" + (f": {said}" if said else "")
            yield {"ph": "i", "s": "g", "name": name, "pid": _LAUNCHER_PID, "tid": 0, "ts": time_us, "args": record}


def _process(pid: int, name: str, place: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": place}}


def _track(pid: int, tid: int, name: str, place: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": place}}


def _slice(pid: int, tid: int, name: str, begin_ns: int, end_ns: int) -> Event:
    times = {"ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3}
    return {"ph": "X", "cat": "launch", "name": name, "pid": pid, "tid": tid, **times}


# ---- What a page shows of such a file ----

_MAX_READ_CHARS = 1 << 28  # of a file: what is behind them is left out
# Begin the names of spans of collectives: those of the engine, of torch, and of NCCL's kernels.
_COLLECTIVES = ("launch: ", "nccl:", "gloo:", "ncclDevKernel_")
_RANK_NAME = re.compile(r"rank (\d+) (?:\(|device )")


@dataclass(frozen=True)
class TracedSpan:
    """A phase of a rank's steps, or a collective. Times in seconds since the first step of the trace began."""

    rank: int
    kind: str  # of a phase its name; of a collective what it does, such as `gather` and `all_reduce`
    name: str
    begin_s: float
    duration_s: float
    is_phase: bool


@dataclass(frozen=True)
class TracedSteps:
    """The steps of a trace."""

    steps: dict[int, tuple[float, float]]  # number -> begin and end on the rank that is first in the file
    spans: list[TracedSpan]
    is_whole: bool  # the file was read to its end


def newest_trace(folder: Path) -> Path | None:
    """Return the trace that was last written into a run folder, if there is one."""
    return max(folder.glob("trace_*.json.gz"), key=lambda path: path.stat().st_mtime_ns, default=None)


def read_steps(path: Path) -> TracedSteps:
    """Read the phases and collectives of a file that `merge_traces` has written. Raises: OSError, ValueError."""
    ranks: dict[int, int] = {}  # process of the file -> rank
    steps: dict[int, tuple[float, float]] = {}
    spans: list[TracedSpan] = []
    num_chars, first_pid = 0, None
    try:
        with gzip.open(path, "rt") as file:
            for line in file:
                num_chars += len(line)
                if num_chars > _MAX_READ_CHARS:
                    return TracedSteps(steps, spans, is_whole=False)
                if not any(mark in line for mark in ('"process_name"', '"cat":"launch"', *_COLLECTIVES)):
                    continue
                event = json.loads(line.rstrip(",\n"))
                if event["ph"] == "M":
                    found = _RANK_NAME.match(event["args"]["name"])
                    if found is not None:
                        ranks[event["pid"]] = int(found[1])
                        first_pid = event["pid"] if first_pid is None else first_pid
                elif event["ph"] == "X" and event["pid"] in ranks:
                    begin_s, duration_s = event["ts"] / 1e6, event["dur"] / 1e6
                    is_own = event.get("cat") == "launch"
                    if is_own and event["tid"] == _STEPS_TID:
                        if event["pid"] == first_pid:
                            steps[int(event["name"].removeprefix("step "))] = begin_s, begin_s + duration_s
                        continue
                    kind = event["name"] if is_own else _kind_of(event["name"])
                    if kind is not None:
                        spans.append(TracedSpan(ranks[event["pid"]], kind, event["name"], begin_s, duration_s, is_own))
    except (EOFError, zlib.error, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a trace of launch, or is damaged: {error!r:.200}") from None
    return TracedSteps(steps, spans, is_whole=True)


def _kind_of(name: str) -> str | None:
    """Return what a span's collective does; None for another span."""
    prefix = next((prefix for prefix in _COLLECTIVES if name.startswith(prefix)), None)
    if prefix is None:
        return None
    rest = name.removeprefix(prefix)
    if prefix == "ncclDevKernel_":
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", rest.partition("_")[0]).lower()
    return rest.partition(" of ")[0]
