"""`launch exec`: one command on every host, equal answers shown once."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from launcher.base.errors import UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.fields import Seconds
from launcher.base.folders import working_folder
from launcher.base.units import format_bytes, printable
from launcher.cli.console.streams import say_waiting
from launcher.cli.options.command import Command, Number, files
from launcher.cli.options.selection import HostOptions, host_options
from launcher.cluster.nodeset import fold, fold_findings
from launcher.hosts.fanout import Fanout, Listener
from launcher.hosts.session import Held, HostResult, Task
from launcher.plan.plan import new_job_id

_QUIET_S = 2.0  # hosts are shown together until none has ended for so long,
_MAX_GATHER_S = 10.0  # or the first of them has waited for so long
_NOT_FOUND = 127
_OF_SHELLS = frozenset(" ;|&<>$*`")  # in a program's name they mean that a shell was meant
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
)
@host_options
@click.option(
    "--timeout", "timeout_s", type=Number(Seconds(0)), metavar="S", help="Stop COMMAND after S seconds. Default: never."
)
@click.option(
    "--supervise",
    is_flag=True,
    help="Run COMMAND under an agent, which stops all processes that it leaves behind. Needs Python on the hosts.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results of all hosts as JSON, when all have ended.")
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
    as_json: bool,
    **values: Any,
) -> None:
    """Run COMMAND on all hosts at once, in this folder, and show equal output once.

    Hosts that end at about the same time are shown together; identical output and errors are grouped. COMMAND gets its
    words unchanged: for pipes and variables write `sh -c '...'`. The exit code is the largest of all hosts; 69 stands
    for a host that is unreachable, 124 for one where --timeout ended COMMAND. Hosts need a POSIX shell only. Ctrl-C and
    --timeout stop COMMAND and its process group; processes that it leaves behind at its own end continue, unless
    --supervise is given.
    """
    options = HostOptions.of(values)
    is_bare = not (supervise or options.in_slurm)
    words = (command, *arguments) if is_bare else ("program", command, *arguments)
    if command.startswith("-"):
        raise UsageError(f'COMMAND "{command}" begins with "-"', hint=f"give its whole path, or ./{command}")
    if is_bare and values["remote_python"] is not None:
        raise UsageError(
            "--remote-python has no effect: COMMAND runs without Python", hint="leave it out, or add --supervise"
        )
    cluster = options.cluster()
    cwd = working_folder()
    tasks = [Task(host, words, cwd) for host in cluster.hosts]
    transports = options.transports(cluster, shell_only=is_bare)
    run = Fanout(tasks, transports.for_host, new_job_id(), say_waiting, has_agents=not is_bare)
    display = ExecDisplay([task.host.name for task in tasks], run.held, _hint_for(words))
    if not as_json:
        run.listener = display
    try:
        transports.prepare(cluster.hosts)
        results = run.run(timeout_s)
    finally:
        transports.close()
    code = 128 + run.interrupted_by if run.interrupted_by else exit_code_of(results)
    if as_json:
        click.echo(json.dumps({"exit_code": int(code), "hosts": [_plain(result) for result in results]}, indent=2))
    else:
        display.finish(results)
    for name in run.unconfirmed_hosts:
        click.echo(click.style("! ", fg="yellow") + f"could not verify clean-up on {name}", err=True)
    ctx.exit(code)


def exit_code_of(results: Sequence[HostResult]) -> int:
    """Return the largest exit code of all hosts; 69 stands for a host without one, 124 where --timeout ended it."""
    codes = []
    for result in results:
        missing = ExitCode.HANG if result.is_late else ExitCode.UNREACHABLE
        codes.append(missing if result.error or result.exit_code is None else result.exit_code)
    return max(codes)


class ExecDisplay(Listener):
    """Shows hosts as they end, those that end shortly after each other together, and frees their output."""

    def __init__(self, names: Sequence[str], held: Held, not_found_hint: str | None) -> None:
        """names: of all hosts, in order. not_found_hint: said of a command that is not found."""
        self._order = {name: number for number, name in enumerate(names)}
        self._held = held
        self._hint = not_found_hint
        self._waiting: dict[str, HostResult] = {}
        self._shown: set[str] = set()
        self._first_s = self._last_s = 0.0  # monotonic, when hosts ended that wait to be shown

    def ended(self, result: HostResult) -> None:
        self._last_s = time.monotonic()
        if not self._waiting:
            self._first_s = self._last_s
        self._waiting[result.host.name] = result

    def turn(self) -> None:
        now_s = time.monotonic()
        if self._waiting and (now_s - self._last_s > _QUIET_S or now_s - self._first_s > _MAX_GATHER_S):
            self._show()

    def finish(self, results: Sequence[HostResult]) -> None:
        """Show all hosts that were not shown yet."""
        self._waiting = {r.host.name: r for r in results if r.host.name not in self._shown}
        self._show()

    def _show(self) -> None:
        results = sorted(self._waiting.values(), key=lambda result: self._order[result.host.name])
        show_results(results, has_headers=len(self._order) > 1, not_found_hint=self._hint)
        for result in results:
            self._held.drop(result)
        self._shown |= self._waiting.keys()
        self._waiting = {}


def show_results(results: Sequence[HostResult], *, has_headers: bool, not_found_hint: str | None = None) -> None:
    """Print each different output once, under the hosts that gave it; then the hosts that failed."""
    blocks: dict[tuple[bytes, bytes], list[HostResult]] = {}
    for result in results:
        if result.stdout or result.stderr:
            blocks.setdefault((bytes(result.stdout), bytes(result.stderr)), []).append(result)
    for (out, err), members in blocks.items():
        header = fold([result.host.name for result in members]) + ":\n"
        for data, stream in ((out, sys.stdout.buffer), (err, sys.stderr.buffer)):
            if data:
                stream.write((header.encode() if has_headers else b"") + data)
                stream.write(b"" if data.endswith(b"\n") else b"\n")
                stream.flush()
        if members[0].is_cut:
            kept = format_bytes(len(out) + len(err))
            _complain(
                [member.host.name for member in members], f"printed more than {kept}: the rest is not shown", None
            )
    codes: dict[int, list[str]] = {}
    for result in results:
        if result.error is None and result.exit_code:
            codes.setdefault(result.exit_code, []).append(result.host.name)
    for code, names in codes.items():
        _complain(names, f"exit code {code}", not_found_hint if code == _NOT_FOUND else None)
    for finding in fold_findings([result.error for result in results if result.error is not None]):
        _complain([finding.where or "?"], finding.message, finding.hint)


def _hint_for(words: Sequence[str]) -> str | None:
    """Return what to say when the command is not found: its one word may be a line for a shell."""
    if len(words) > 1 or _OF_SHELLS.isdisjoint(words[0]):
        return None
    return f"the words reach a program as they are; for a shell give: launch exec ... -- sh -c {shlex.quote(words[0])}"


def _plain(result: HostResult) -> dict[str, Any]:
    error = result.error
    return {
        "host": result.host.name,
        "exit_code": result.exit_code,
        "stdout": result.printed,
        "stderr": result.stderr.decode("utf-8", "replace"),
        "is_cut": result.is_cut,
        "error": None if error is None else error.message,
        "hint": None if error is None else error.hint,
    }


def _complain(names: Sequence[str], message: str, hint: str | None) -> None:
    click.echo(click.style("✗ ", fg="red") + f"{fold(names)}: {printable(message)}", err=True)
    if hint:
        click.echo(f"  → {printable(hint)}", err=True)
