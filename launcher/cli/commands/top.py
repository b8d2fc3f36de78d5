"""`launch top`: watch a job on the terminal, or print what the screen would show."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click

from launcher.base.errors import LauncherError, UsageError
from launcher.cli.commands.jobs import complete_job, end_job, grouped_stacks, take_stacks
from launcher.cli.commands.trace import record_trace
from launcher.cli.top import frame
from launcher.journal.live import LiveJob
from launcher.registry.registry import JobEntry, all_jobs, find_job

_MAX_RANKS = 200  # of a frame
_tracing = threading.Lock()
_EPILOG = """\b
examples:
  launch top
  launch top calm-otter
  launch top calm-otter --once
"""


@click.command("top", epilog=_EPILOG)
@click.argument("job", required=False, metavar="JOB", shell_complete=complete_job)
@click.option("--once", is_flag=True, help="Print what there is to see now as text, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON, and end.")
def top(job: str | None, once: bool, as_json: bool) -> None:
    """Watch JOB while it runs, or look at one that has ended: its ranks, curves, phases, verdicts and logs.

    JOB is an id of `launch ps`, or the beginning of one. Without it there is a list of the jobs, to choose from. Needs
    the package textual: pip install 'launch-zero[top]'; --once and --json do not.
    """
    entry = None if job is None else find_job(job)
    if once or as_json:
        _print(entry, as_json=as_json)
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "launch top needs a terminal",
            hint="without one: launch top --once JOB, launch show JOB, or launch ps --json for programs",
        )
    try:
        from launcher.cli.top.app import Actions, TopApp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        raise LauncherError(
            "launch top needs the package textual",
            hint="pip install 'launch-zero[top]'; or, as text: launch top --once",
        ) from None
    TopApp(Actions(all_jobs, _kill, _stacks, _trace), entry).run()


def _kill(entry: JobEntry) -> str:
    return end_job(entry, wait=lambda _: None)


def _stacks(entry: JobEntry) -> str:
    return "\n".join(f"{heading}\n{stack}" for heading, stack in grouped_stacks(take_stacks(entry)))


def _trace(entry: JobEntry, is_cancelled: Callable[[], bool]) -> str:
    with _tracing:  # one that was given up takes a moment to end
        recorded = record_trace(entry, say=lambda _: None, is_cancelled=is_cancelled)
    return "\n".join([recorded.summary, *(f"rank {rank}: {reason}" for rank, reason in recorded.missing.items())])


def _print(entry: JobEntry | None, *, as_json: bool) -> None:
    width = shutil.get_terminal_size((120, 24)).columns
    if entry is None:
        jobs = [(each, each.state) for each in all_jobs()]
        views = frame.ProgressOfJobs().look([each for each, state in jobs if state in frame.ACTIVE])
        if as_json:
            found = [
                {"job_id": each.job_id, "state": state, "progress": frame.progress_json(views.get(each.job_id))}
                for each, state in jobs
            ]
            click.echo(json.dumps(found, indent=2))
            return
        click.echo(frame.list_title(width) if jobs else "no job is running, and none has ended in the last week")
        for each, state in jobs:
            click.echo("".join(piece.text for piece in frame.list_row(each, state, views.get(each.job_id), width)))
        return
    state = entry.state
    view = frame.with_end(LiveJob(Path(entry.run_folder)).look(time.time(), reads_all=True), state)
    if as_json:
        click.echo(json.dumps(frame.as_json(entry, view, state), indent=2))
        return
    for line in frame.plain_frame(entry, view, state, width=width, max_ranks=_MAX_RANKS):
        click.echo(line)
