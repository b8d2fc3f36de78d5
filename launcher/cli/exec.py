"""`launch exec`: one command on every host, equal answers shown once."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import click

from launcher.base.errors import Diagnostic, UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.folders import working_folder
from launcher.base.units import format_bytes
from launcher.cli.command import Command
from launcher.cli.completion import files
from launcher.cli.hosts import HostOptions, host_options
from launcher.cli.numbers import Seconds
from launcher.cluster.fold import fold
from launcher.job.bare import BareSession
from launcher.job.everywhere import MAX_OUTPUT_BYTES, Everywhere, HostResult, Task
from launcher.job.plan import new_job_id

_EPILOG = """\b
examples:
  launch exec --hostfile hosts nvidia-smi -L
  launch exec --hostfile hosts --include node[01-04] -- df -h /data
  launch exec --hostfile hosts -- sh -c 'ls /data | wc -l'
"""


@click.command(
    "exec",
    cls=Command,
    context_settings={"allow_interspersed_args": False},
    epilog=_EPILOG,
    short_help="Run a command on all hosts.",
)
@host_options
@click.option("--timeout", "timeout_s", type=Seconds(0), help="Stop what runs longer. Default: none.")
@click.option(
    "--supervise",
    is_flag=True,
    help="Run COMMAND under an agent (needs Python there), which ends all that it leaves running.",
)
@click.argument("command", shell_complete=files)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...", shell_complete=files)
@click.pass_context
def exec_command(
    ctx: click.Context,
    /,
    command: str,
    arguments: tuple[str, ...],
    timeout_s: float | None,
    supervise: bool,
    **values: Any,
) -> None:
    """Run COMMAND on all hosts at once, in this folder, and show equal output once.

    The words reach COMMAND as they are: for pipes and variables give `sh -c '...'`. The exit code is the largest of all
    hosts'; 69 when a host could not be reached. The hosts need a POSIX shell and nothing else. Ctrl-C and --timeout end
    COMMAND and its process group; what it leaves running at its own end goes on, unless --supervise is given.
    """
    options = HostOptions(**values)
    is_bare = not (supervise or options.in_slurm)
    words = (command, *arguments) if is_bare else ("program", command, *arguments)
    if command.startswith("-"):
        raise UsageError(f'COMMAND "{command}" begins with "-"', hint=f"give its whole path, or ./{command}")
    cluster = options.cluster()
    cwd = working_folder()
    tasks = [Task(host, words, cwd) for host in cluster.hosts]
    transports = options.reach(cluster, shell_only=is_bare)
    run = Everywhere(tasks, transports.for_host, new_job_id(), _say_waiting, BareSession if is_bare else None)
    try:
        transports.prepare(cluster.hosts)
        results = run.run(timeout_s)
    finally:
        transports.close()
    show_results(results)
    for name in run.unconfirmed_hosts:
        click.echo(
            click.style("! ", fg="yellow") + f"{name} could not be asked whether anything is left there", err=True
        )
    ctx.exit(128 + run.interrupted_by if run.interrupted_by else exit_code_of(results))


def exit_code_of(results: Sequence[HostResult]) -> int:
    """Return the largest exit code of all hosts; 69 stands for a host without one."""
    return max(
        ExitCode.UNREACHABLE if result.error or result.exit_code is None else result.exit_code for result in results
    )


def show_results(results: Sequence[HostResult]) -> None:
    """Print each different output once, under the hosts that gave it; then the hosts that failed."""
    blocks: dict[tuple[bytes, bytes], list[HostResult]] = {}
    for result in results:
        if result.stdout or result.stderr:
            blocks.setdefault((bytes(result.stdout), bytes(result.stderr)), []).append(result)
    for (out, err), members in blocks.items():
        header = fold([result.host.name for result in members]) + ":\n"
        for data, stream in ((out, sys.stdout.buffer), (err, sys.stderr.buffer)):
            if data:
                # One host needs no header.
                stream.write((header.encode() if len(results) > 1 else b"") + data)
                stream.write(b"" if data.endswith(b"\n") else b"\n")
                stream.flush()
        if members[0].is_cut:
            _complain(members, f"printed more than {format_bytes(MAX_OUTPUT_BYTES)}: the rest is not shown", None)
    failures: dict[tuple[str, str | None], list[HostResult]] = {}
    for result in results:
        if result.error is not None:
            failures.setdefault(_without_host(result.host.name, result.error), []).append(result)
        elif result.exit_code:
            failures.setdefault((f"exit code {result.exit_code}", None), []).append(result)
    for (message, hint), members in failures.items():
        error = members[0].error if len(members) == 1 else None
        _complain(members, *((message, hint) if error is None else (error.message, error.hint)))


def _without_host(name: str, error: Diagnostic) -> tuple[str, str | None]:
    """Return message and hint with HOST for the host's name: what befell many hosts is then told once."""
    own = re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])")
    return own.sub("HOST", error.message), error.hint and own.sub("HOST", error.hint)


def _complain(results: Sequence[HostResult], message: str, hint: str | None) -> None:
    hosts = fold([result.host.name for result in results])
    click.echo(click.style("✗ ", fg="red") + f"{hosts}: {message}", err=True)
    if hint:
        click.echo(f"  → {hint}", err=True)


def _say_waiting(what: str) -> None:
    click.echo(f"waiting for {what}", err=True)
