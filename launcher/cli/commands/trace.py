"""`launch trace`: one file of what several ranks of a running job do in their next steps, on one clock."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from launcher.base.errors import HostfileError, LauncherError, UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.fields import Whole
from launcher.base.private_files import write_private
from launcher.base.processes import identity
from launcher.base.timeouts import timeouts
from launcher.base.units import format_bytes, printable
from launcher.cli.commands.jobs import check_running, job_argument
from launcher.cli.console.streams import say
from launcher.cli.options.command import Number
from launcher.cluster.nodeset import expand_numbers
from launcher.journal.read import JobJournal, JournalFile, Record, TryJournal, last_record
from launcher.journal.trace_merge import MARKED, MergedTrace, RankTrace, merge_traces, read_head
from launcher.journal.trace_request import MAX_STEPS, REQUEST_FILE, TraceRequest, answer_file, parsed_request
from launcher.registry.registry import JobEntry, find_job

DEFAULT_STEPS = 3
_POLL_S = 0.1
_TELL_INTERVAL_S = 2.0
_DEFAULT_RANKS = 8  # a file of more is large, and seldom says more
_KINDS = frozenset({"job", "clock", "exit", "end", *MARKED})
_EPILOG = """\b
examples:
  launch trace calm-otter-4f2a
  launch trace calm --steps 5 --ranks 0,8-11 -o trace.json.gz
"""


def _rank_list(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[int, ...]:
    try:
        return () if text is None else tuple(sorted({int(number) for number in expand_numbers(text, text)}))
    except HostfileError:
        raise click.BadParameter(f"{text!r} is no list of ranks; write 0,5 or 0-3.") from None


@click.command("trace", epilog=_EPILOG)
@job_argument
@click.option(
    "--steps",
    "num_steps",
    type=Number(Whole(1, MAX_STEPS)),
    default=DEFAULT_STEPS,
    help=f"Optimizer steps to record. Default: {DEFAULT_STEPS}.",
)
@click.option(
    "--ranks",
    metavar="LIST",
    callback=_rank_list,
    help=f"Ranks to record, such as 0,5 or 0-3. Default: all, of more than {_DEFAULT_RANKS} some of every host.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write. Default: trace_N.json.gz in the folder of the job's logs.",
)
@click.pass_context
def trace(ctx: click.Context, /, job: str, num_steps: int, ranks: tuple[int, ...], output: Path | None) -> None:
    """Record what ranks of JOB do in their next steps, as one file for Perfetto; the job continues.

    JOB is an id of `launch ps`, or the beginning of one. Ctrl-C leaves the job as it is.
    """
    recorded = record_trace(find_job(job), num_steps, ranks, output, say=say)
    for rank, reason in recorded.missing.items():
        say(click.style("! ", fg="yellow") + printable(f"rank {rank}: {reason}"))
    click.echo(recorded.summary)
    if recorded.missing:
        ctx.exit(ExitCode.FAILURE)


@dataclass(frozen=True)
class RecordedTrace:
    """A file that was written."""

    summary: str  # for the user: where it is, what is in it, and what opens it
    missing: dict[int, str]  # ranks that are not in it, and why


def record_trace(
    entry: JobEntry,
    num_steps: int = DEFAULT_STEPS,
    ranks: Sequence[int] = (),
    output: Path | None = None,
    *,
    say: Callable[[str], object],
    is_cancelled: Callable[[], bool] = lambda: False,
) -> RecordedTrace:
    """Have ranks of a running job record their next steps, and write these to one file.

    ranks: none: a choice of ours. output: None: a new file in the run folder. say: is called with what the user should
    know meanwhile. Raises: LauncherError where nothing can be recorded, or was; also where `is_cancelled` says so.
    """
    check_running(entry, "trace")
    run = _Run(entry)
    chosen = run.chosen(ranks, say)
    request = TraceRequest(os.urandom(6).hex(), os.getpid(), chosen, num_steps, run.first_step(chosen))
    target = output or _free_name(Path(entry.run_folder))
    if not target.absolute().parent.is_dir():
        raise UsageError("there is no such folder", where=str(target.parent), hint="create it, or name another with -o")
    with _requested(run.folder, request):
        missing = _wait(run, request, say, is_cancelled)
        merged = _merge(run, [rank for rank in request.ranks if rank not in missing], missing, target)
    return RecordedTrace(_summary(request, missing, merged, target), missing)


class _Run:
    """What the journal says of the start of the job that runs."""

    def __init__(self, entry: JobEntry) -> None:
        """Raises: UsageError without a journal."""
        self.entry = entry
        self._start: TryJournal = JobJournal(Path(entry.run_folder)).tries[-1]
        self.folder = self._start.folder
        self._file = JournalFile(self._start.launcher.path)
        self.records: list[Record] = []
        self.look()
        heads = [record for record in self.records if record["kind"] == "job"]
        if not heads:
            raise UsageError(
                f"{entry.job_id} keeps no journal, by which ranks are asked for a trace",
                hint="start it without --no-journal, or wait until its ranks have been started",
            )
        self.host_of: dict[int, str] = {rank: host["name"] for host in heads[-1]["hosts"] for rank in host["ranks"]}

    def look(self) -> None:
        """Read what is new."""
        self.records += self._file.poll(_KINDS)

    def why_over(self, rank: int) -> str | None:
        """Return why nothing more can come of a rank; None while something can."""
        for record in self.records:
            if record["kind"] == "exit" and record["rank"] == rank:
                return "it has ended before its trace was complete"
        is_over = any(record["kind"] == "end" for record in self.records) or self.entry.state != "running"
        return "the job has ended before its trace was complete" if is_over else None

    def chosen(self, ranks: Sequence[int], say: Callable[[str], object]) -> list[int]:
        """Return the ranks to trace. ranks: those that are named; none: a choice of ours. Raises: UsageError."""
        unknown = [rank for rank in ranks if rank not in self.host_of]
        if unknown:
            hint = f"it has ranks {min(self.host_of)} to {max(self.host_of)}"
            raise UsageError(f"job {self.entry.job_id} has no rank {unknown[0]}", hint=hint)
        found = list(ranks) or _spread(self.host_of)
        without = [rank for rank in found if not self._has_torch(rank)]
        if without:
            raise UsageError(
                f"{_named(without)} {'have' if len(without) > 1 else 'has'} not imported torch: a trace is what torch's"
                " profiler records of a step",
                where=self.entry.job_id,
                hint="while the script is still loading, try again when it trains; launch stacks shows where it is",
            )
        if not ranks and len(found) < len(self.host_of):
            shown = ", ".join(map(str, found))
            say(f"of {len(self.host_of)} ranks {len(found)} are traced, some of every host: {shown}")
        return found

    def _has_torch(self, rank: int) -> bool:
        path = self.folder / f"rank_{rank}.jsonl"
        return last_record(path, "step") is not None or any(JournalFile(path).poll(frozenset({"torch"})))

    def first_step(self, ranks: Sequence[int]) -> int:
        """Return the step to begin with: soon, but when all ranks know of it. 0, at once, where they count apart."""
        if len(ranks) == 1:
            return 0
        last = [last_record(self.folder / f"rank_{rank}.jsonl", "step") for rank in ranks]
        known = [record for record in last if record is not None]
        if len(known) < len(last):
            return 0
        margin_s = timeouts().trace_notice_s
        reached = [int(record["step"]) for record in known]
        rate = max(float(record["num_steps"]) / max(float(record["duration_s"]), 1e-6) for record in known)  # a second
        if max(reached) - min(reached) > 2 + rate * margin_s:
            return 0
        progress = last_record(self._start.launcher.path, "progress")
        reached += [int(each[2]) for each in (progress or {"ranks": []})["ranks"] if each[2] is not None]
        # A step that takes much longer than the margin will hardly end within it.
        num_unwritten = max(int(record["num_steps"]) for record in known) - 1
        return max(reached) + 2 + num_unwritten + max(0, math.ceil(rate * margin_s - 0.2))

    def traces(self, ranks: Sequence[int]) -> list[RankTrace]:
        """Return where the answers are, and how the clocks differ."""
        offsets_s = {each["host"]: float(each["offset_s"]) for each in self.records if each["kind"] == "clock"}
        ours_s = time.time() - time.monotonic()
        found = []
        for rank in ranks:
            host = self.host_of[rank]
            offset_s = offsets_s.get(host, 0.0)
            shift_s = ours_s + (offset_s if math.isfinite(offset_s) else 0.0)
            found.append(RankTrace(rank, host, self.folder / answer_file(rank), shift_s))
        return found


def _spread(host_of: dict[int, str]) -> list[int]:
    """Return all ranks, or the first ones of each host, of many hosts some."""
    hosts: dict[str, list[int]] = {}
    for rank, host in sorted(host_of.items()):
        hosts.setdefault(host, []).append(rank)
    every = list(hosts.values())[:: max(1, -(-len(hosts) // _DEFAULT_RANKS))]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*every))
    found = sorted(host_of) if len(host_of) <= _DEFAULT_RANKS else [rank for rank in turns if rank is not None]
    return sorted(found[:_DEFAULT_RANKS])


@contextlib.contextmanager
def _requested(folder: Path, request: TraceRequest) -> Iterator[None]:
    """Ask the launcher for a trace while the block runs; then nothing is left of it but the file. Raises: UsageError.

    What is not done by the end is dropped: the launcher sees that the request has gone.
    """
    path = folder / REQUEST_FILE
    with contextlib.suppress(OSError):
        other = parsed_request(path.read_bytes())
        if other is not None and identity(other.pid):
            raise UsageError(
                f"another launch trace of this job has not ended (pid {other.pid})", hint="wait for it, or end it"
            )
    _remove_answers(folder, request)
    write_private(path, request.encoded())
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        _remove_answers(folder, request)


def _remove_answers(folder: Path, request: TraceRequest) -> None:
    for rank in request.ranks:
        (folder / answer_file(rank)).unlink(missing_ok=True)


def _wait(
    run: _Run, request: TraceRequest, say: Callable[[str], object], is_cancelled: Callable[[], bool]
) -> dict[int, str]:
    """Wait for all answers; return the ranks that have none, and why."""
    missing: dict[int, str] = {}
    waited = list(request.ranks)
    tell_at_s, told = time.monotonic() + _TELL_INTERVAL_S, 0
    while not is_cancelled():
        run.look()  # before the answers: what a rank has sent is there before its end is
        over = {rank: run.why_over(rank) for rank in waited}
        for rank in list(waited):
            head = read_head(run.folder / answer_file(rank))
            if head is not None and head.id == request.id:
                missing |= {rank: head.error} if head.error else {}
            elif (reason := over[rank]) is not None:
                missing[rank] = reason
            else:
                continue
            waited.remove(rank)
        if not waited:
            return missing
        if time.monotonic() > tell_at_s and told != len(waited):
            tell_at_s, told = time.monotonic() + _TELL_INTERVAL_S, len(waited)
            since = f" from step {request.first_step} on" if request.first_step else ""
            steps = "step" if request.num_steps == 1 else f"{request.num_steps} steps"
            say(f"waiting for {_named(waited)} to take {steps}{since} (Ctrl-C: leave the job as it is)")
        time.sleep(_POLL_S)
    raise LauncherError("the trace was cancelled", where=run.entry.job_id)


def _merge(run: _Run, ranks: Sequence[int], missing: dict[int, str], target: Path) -> MergedTrace:
    """Write the file. Raises: LauncherError where no rank has a trace."""
    if not ranks:
        reasons = set(missing.values())
        what = next(iter(reasons)) if len(reasons) == 1 else json.dumps(missing)
        raise LauncherError(f"there is no trace: {what}", where=f"{run.entry.job_id}, {_named(list(missing))}")
    run.look()
    return merge_traces(target, run.traces(ranks), run.records)


def _summary(request: TraceRequest, missing: dict[int, Any], merged: MergedTrace, target: Path) -> str:
    ranks = _named([rank for rank in request.ranks if rank not in missing])
    steps = f"steps {merged.first_step} to {merged.last_step}"
    if merged.common_steps < min(request.num_steps, merged.last_step - merged.first_step + 1):
        steps += f", {merged.common_steps} of them on every rank"
    return (
        f"{target} ({format_bytes(merged.num_bytes)}): {ranks}, {steps}\n"
        "open it in https://ui.perfetto.dev, which reads it in the browser and uploads nothing, or in chrome://tracing"
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _free_name(folder: Path) -> Path:
    return next(path for number in itertools.count(1) if not (path := folder / f"trace_{number}.json.gz").exists())
