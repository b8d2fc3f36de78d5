"""`launch stacks`: the stack traces of all ranks of a running job, without disturbing it."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import click

from launcher.base.errors import LauncherError, UsageError
from launcher.base.timeouts import timeouts
from launcher.base.units import printable
from launcher.cli.commands.jobs import job_argument
from launcher.fleet.signals import STACKS_SIGNAL
from launcher.job.hang import group_by_stack
from launcher.registry.registry import find_job, send_signal

_POLL_S = 0.05

_EPILOG = """\b
examples:
  launch stacks calm-otter-4f2a
  launch stacks --all calm
"""


@click.command("stacks", epilog=_EPILOG)
@job_argument
@click.option(
    "--all", "shows_all", is_flag=True, help="Every rank's stack trace. Default: ranks with identical ones are grouped."
)
def stacks(job: str, shows_all: bool) -> None:
    """Print the Python stack traces of all ranks of JOB, which continues. JOB is an id of `launch ps`, or its start."""
    entry = find_job(job)
    if entry.state == "elsewhere":
        raise UsageError(
            f"the launcher of {entry.job_id} runs on {entry.machine}", hint=f"there: launch stacks {entry.job_id}"
        )
    if entry.state != "running":
        raise UsageError(f"{entry.job_id} has ended", hint=f"what its ranks wrote: launch logs {entry.job_id}")
    folder = Path(entry.run_folder)
    before = _versions(folder)
    if not send_signal(entry, STACKS_SIGNAL):
        raise UsageError(f"{entry.job_id} has just ended", hint=f"launch logs {entry.job_id}")
    text = _wait_for_stacks(folder, before)
    if shows_all:
        click.echo(printable(text))
        return
    for ranks, stack in group_by_stack(text):
        click.echo(click.style(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:", bold=True))
        click.echo(printable(stack))


def _versions(folder: Path) -> dict[Path, tuple[int, int]]:
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
        for path, version in _versions(folder).items():
            if before.get(path) != version:
                return path.read_text()
        time.sleep(_POLL_S)
    raise LauncherError(
        f"no stacks after {timeouts().stacks_command_s:g} s",
        where=str(folder),
        hint="is its disk full? see the launcher's own output",
    )
