"""`launch ps`, `launch logs`, `launch stacks` and `launch kill`: find a job again, read it, end it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import operator
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from launcher.base.errors import LauncherError, UsageError
from launcher.base.fields import Whole
from launcher.base.processes import members_of_job, sweep_job
from launcher.base.timeouts import timeouts
from launcher.base.units import format_duration, printable
from launcher.cli.console.lines import MixedLines
from launcher.cli.console.streams import say_waiting, show_table
from launcher.cli.options.command import Number
from launcher.cli.top.frame import PROGRESS_TITLE, ProgressOfJobs, progress_json, progress_text
from launcher.cluster.nodeset import fold
from launcher.fleet.signals import NATIVE_STACKS_SIGNAL, STACKS_SIGNAL
from launcher.journal.live import JobView
from launcher.plan.plan import DEFAULT_LEASE_S
from launcher.registry.log_reader import LogReader
from launcher.registry.registry import (
    JobEntry,
    all_jobs,
    ask_to_end,
    find_job,
    latest,
    process_identity,
    send_signal,
)

_POLL_S = 0.1
_TELL_AFTER_S = 2.0
_REPEAT_S = 1.2  # two signals within a second count as one, see `fleet.signals`
_MAX_COMMAND_CHARS = 60
_PROGRESS = 5  # the column that is left out where no job has any

_LOGS_EPILOG = """\b
examples:
  launch logs calm-otter-4f2a
  launch logs calm --rank 0 --tail 20 --follow
"""
_KILL_EPILOG = """\b
examples:
  launch kill calm-otter-4f2a
  launch kill --now calm
"""

_STACKS_EPILOG = """\b
examples:
  launch stacks calm-otter-4f2a
  launch stacks --all calm
  launch stacks --native calm
"""


def complete_job(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the ids of jobs, to the shell."""
    jobs = [entry for entry in all_jobs() if entry.job_id.startswith(incomplete)]
    return [CompletionItem(entry.job_id, help=f"{entry.state}: {shlex.join(entry.command)}") for entry in jobs]


def _named_job(_ctx: click.Context, _param: click.Parameter, job: str | None) -> str:
    if job is None:
        raise UsageError("no JOB is named", hint="launch ps shows the jobs there are")
    return job


job_argument = click.argument("job", required=False, metavar="JOB", callback=_named_job, shell_complete=complete_job)


@click.command("ps")
@click.option("--json", "as_json", is_flag=True, help="Print the jobs as JSON.")
def ps(as_json: bool) -> None:
    """Show the jobs that ended today with their exit codes, then those that run: they stay on the screen.

    Of those that run it shows step, loss and rate where their journal has them.
    """
    today = date.today()
    states = [(entry, entry.state) for entry in all_jobs()]
    running = [(entry, state) for entry, state in states if state in ("running", "elsewhere")]
    over = [
        (entry, state)
        for entry, state in states
        if state in ("ended", "lost") and date.fromtimestamp(entry.ended_s or entry.touched_s) == today
    ]
    views = ProgressOfJobs().look([entry for entry, _ in running])
    if as_json:
        jobs = [
            dataclasses.asdict(entry) | {"state": s, "progress": progress_json(views.get(entry.job_id))}
            for entry, s in over + running
        ]
        click.echo(json.dumps(jobs, indent=2))
        return
    rows: list[tuple[str, ...]] = [("JOB", "STATE", "SINCE", "RANKS", "HOSTS", PROGRESS_TITLE, "COMMAND")]
    rows += [_row(entry, state, views.get(entry.job_id)) for entry, state in over + running]
    if not any(row[_PROGRESS] for row in rows[1:]):
        rows = [row[:_PROGRESS] + row[_PROGRESS + 1 :] for row in rows]
    if len(rows) == 1:
        click.echo("no job is running, and none ended today")
        return
    show_table(rows)


def _row(entry: JobEntry, state: str, view: JobView | None) -> tuple[str, ...]:
    what = {
        "running": "running",
        "ended": f"exit {entry.exit_code}",
        "lost": "launcher gone",
        "elsewhere": f"on {entry.machine}" + (f", Slurm job {entry.slurm_job}" if entry.slurm_job else ""),
    }[state]
    started = datetime.fromtimestamp(entry.started_s)
    since = started.strftime("%H:%M" if started.date() == date.today() else "%b %d %H:%M")
    if state != "elsewhere" and (end_s := entry.ended_s or (time.time() if state == "running" else None)):
        since += f" ({format_duration(max(0.0, end_s - entry.started_s))})"
    command = shlex.join(entry.command)
    short = command if len(command) <= _MAX_COMMAND_CHARS else command[: _MAX_COMMAND_CHARS - 1] + "…"
    progress = "" if view is None else progress_text(view)
    return entry.job_id, what, since, str(entry.num_ranks), fold(entry.hosts), progress, short


@click.command("logs", epilog=_LOGS_EPILOG)
@job_argument
@click.option(
    "--rank",
    type=Number(Whole(0)),
    help="This rank only, as it was written. Default: all ranks, each line prefixed with [rank].",
)
@click.option("-f", "--follow", is_flag=True, help="Continue until the job ends.")
@click.option("--tail", "num_lines", type=Number(Whole(0)), metavar="N", help="Start with the last N lines of a rank.")
def logs(job: str, rank: int | None, follow: bool, num_lines: int | None) -> None:
    """Show what the ranks of JOB wrote. JOB is an id of `launch ps`, or the beginning of one."""
    entry = find_job(job)
    if not entry.is_here and not Path(entry.run_folder).is_dir():
        hint = f"it is on {entry.machine}"
        raise UsageError(f"the run folder of {entry.job_id} is not here", where=entry.run_folder, hint=hint)
    reader = LogReader(entry.run_folder, rank, num_lines)
    lines = MixedLines()
    while True:
        # Asked before reading: what a job wrote until its end is read after its end.
        is_last = not follow or entry.state not in ("running", "elsewhere")
        for number, pieces in itertools.groupby(reader.read(), key=operator.itemgetter(0)):
            for _, data in pieces:
                shown = lines.feed(number, f"[{number}] ".encode(), data) if rank is None else data
                sys.stdout.buffer.write(shown)
            if is_last:
                sys.stdout.buffer.write(lines.flush())
        if is_last:
            break
        sys.stdout.buffer.write(lines.settle(time.monotonic()))
        sys.stdout.buffer.flush()
        time.sleep(_POLL_S)
        with contextlib.suppress(UsageError):  # the entry has been dropped: what is known holds
            entry = find_job(entry.job_id)
    sys.stdout.buffer.write(lines.flush())
    sys.stdout.buffer.flush()
    if not reader.has_found:
        raise _no_log(entry, rank, reader.ranks())


def _no_log(entry: JobEntry, rank: int | None, ranks: list[int]) -> LauncherError:
    if rank is not None and ranks:
        return UsageError(f"job {entry.job_id} has no rank {rank}", hint=f"it has ranks 0 to {ranks[-1]}")
    hint = "no rank has been started yet"
    if entry.ended_s is not None:
        hint = "it ended before any rank was started, or its run folder was removed"
    return LauncherError("there are no logs", where=entry.run_folder, hint=hint)


@click.command("kill", epilog=_KILL_EPILOG)
@job_argument
@click.option("--now", is_flag=True, help="Kill the ranks at once. Default: SIGTERM, the job's --grace, SIGKILL.")
def kill(job: str, now: bool) -> None:
    """End JOB on all its hosts and wait until it is gone.

    JOB is an id of `launch ps`, or the beginning of one, or the name of --job-id where each node runs its own command.
    """
    click.echo(end_job(find_job(job), now=now))


def end_job(entry: JobEntry, *, now: bool = False, wait: Callable[[str], object] = say_waiting) -> str:
    """End a job, wait until it is gone, and return what there is to say. Raises: LauncherError.

    now: kill the ranks at once. wait: is called with what takes long.
    """
    if entry.ended_s is None and not entry.is_here:
        by_slurm = f"scancel {entry.slurm_job} ends its Slurm job; or " if entry.slurm_job else ""
        raise UsageError(
            f"the launcher of {entry.job_id} runs on {entry.machine}",
            hint=f"{by_slurm}on {entry.machine}: launch kill {entry.job_id}",
        )
    start_s = time.monotonic()
    if entry.ended_s is None and ask_to_end(entry) and _has_gone(entry, now, wait):
        return f"{entry.job_id} has ended ({format_duration(time.monotonic() - start_s)})"
    return _sweep(entry)


def _has_gone(entry: JobEntry, now: bool, wait: Callable[[str], object]) -> bool:
    """Wait for the end of the launcher and of what it leaves here; return whether no sweep is needed.

    With `now` the launcher is reminded until it kills, and at last killed itself: False then.
    """
    start_s = time.monotonic()
    repeat_at_s = start_s + _REPEAT_S
    tell_at_s = start_s + _TELL_AFTER_S
    give_up_at_s = start_s + timeouts().kill_command_s + (0.0 if now else entry.grace_s)
    while (has_launcher := process_identity(entry.pid) == entry.process) or _leaves_ranks(entry):
        if now and not has_launcher:
            return False
        now_s = time.monotonic()
        if now_s > give_up_at_s:
            if now:
                send_signal(entry, signal.SIGKILL)
                return False
            hint = f"launch kill --now {entry.job_id}"
            raise LauncherError(f"it has not ended after {now_s - start_s:.0f} s", where=entry.job_id, hint=hint)
        if now and now_s > repeat_at_s:
            repeat_at_s = now_s + _REPEAT_S
            ask_to_end(entry)
        if now_s > tell_at_s:
            tell_at_s = float("inf")
            wait(f"the end of {entry.job_id} (pid {entry.pid})")
        time.sleep(_POLL_S)
    return True


def _leaves_ranks(entry: JobEntry) -> bool:
    """Whether a launcher ended without a word, such as by a signal it does not handle: agents keep the grace then."""
    return latest(entry).ended_s is None and bool(members_of_job(entry.job_id))


def _sweep(entry: JobEntry) -> str:
    """End what a launcher that has gone left on this machine, by the job's id; return what there is to say."""
    left = members_of_job(entry.job_id)
    sweep_job(entry.job_id)
    if members_of_job(entry.job_id):
        raise LauncherError(
            "processes of the job cannot be killed", where=entry.job_id, hint="see: ps -eo pid,stat,cmd"
        )
    ended = f"had ended already (exit code {entry.exit_code})" if entry.ended_s is not None else "had lost its launcher"
    found = "nothing was" if not left else "1 process was" if len(left) == 1 else f"{len(left)} processes were"
    said = f"{entry.job_id} {ended}; {found} left on {socket.gethostname()}"
    if entry.ended_s is None and len(entry.hosts) > 1:
        said += (
            f"\non other hosts its ranks end with their lease, after {DEFAULT_LEASE_S:.0f} s unless --lease says else"
        )
    return said


def check_running(entry: JobEntry, command: str) -> None:
    """Check that a job runs on this machine. command: of ours, which wants it. Raises: UsageError."""
    if entry.state == "elsewhere":
        raise UsageError(
            f"the launcher of {entry.job_id} runs on {entry.machine}", hint=f"there: launch {command} {entry.job_id}"
        )
    if entry.state != "running":
        raise UsageError(f"{entry.job_id} has ended", hint=f"what its ranks wrote: launch logs {entry.job_id}")


@click.command("stacks", epilog=_STACKS_EPILOG)
@job_argument
@click.option(
    "--all", "shows_all", is_flag=True, help="Every rank's stack trace. Default: ranks with identical ones are grouped."
)
@click.option(
    "--native", is_flag=True, help="Also the stacks of native code, by py-spy, which each host must have installed."
)
def stacks(job: str, shows_all: bool, native: bool) -> None:
    """Print the Python stack traces of all ranks of JOB, which continues. JOB is an id of `launch ps`, or its start.

    Where ranks wait in a collective, the first lines say in which, and for which rank.
    """
    from launcher.job.hang import summary_of  # what runs jobs is not for whoever looks at them

    text = take_stacks(find_job(job), native=native)
    if shows_all:
        click.echo(printable(text))
        return
    if summary := summary_of(text):
        click.echo(printable(summary) + "\n")
    for heading, stack in grouped_stacks(text):
        click.echo(click.style(heading, bold=True))
        click.echo(printable(stack))


def grouped_stacks(text: str) -> list[tuple[str, str]]:
    """Return stack traces, each with the ranks that have it as its heading; the largest group last."""
    from launcher.job.hang import group_by_stack

    return [
        (f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:", stack)
        for ranks, stack in group_by_stack(text)
    ]


def take_stacks(entry: JobEntry, *, native: bool = False) -> str:
    """Have all ranks write their stack traces, and return the text. The job continues. Raises: LauncherError.

    native: with those of native code.
    """
    check_running(entry, "stacks")
    folder = Path(entry.run_folder)
    before = _stacks_files(folder)
    if not send_signal(entry, NATIVE_STACKS_SIGNAL if native else STACKS_SIGNAL):
        raise UsageError(f"{entry.job_id} has just ended", hint=f"launch logs {entry.job_id}")
    return _wait_for_stacks(folder, before)


def _stacks_files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return what tells each file of stacks from one that takes its place later, whatever the clock says by then.

    A restart of the job has a folder of its own inside the run's.
    """
    found = {}
    for path in (folder / "stacks.txt", *folder.glob("restart_*/stacks.txt")):
        with contextlib.suppress(OSError):
            status = path.stat()
            found[path] = (status.st_ino, status.st_mtime_ns)
    return found


def _wait_for_stacks(folder: Path, before: dict[Path, tuple[int, int]]) -> str:
    """Return what the launcher writes now."""
    deadline = time.monotonic() + timeouts().stacks_command_s
    while time.monotonic() < deadline:
        for path, version in _stacks_files(folder).items():
            if before.get(path) != version:
                return path.read_text()
        time.sleep(_POLL_S)
    raise LauncherError(
        f"no stacks after {timeouts().stacks_command_s:g} s",
        where=str(folder),
        hint="is its disk full? see the launcher's own output",
    )
