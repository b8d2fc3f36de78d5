"""`launch run`: what a line means, and which of the ways to start ranks it asks for.

All of them but the common one, a job on this machine, are imported when they are used.
"""

from __future__ import annotations

import os
from typing import Any

import click

from launcher.base.errors import UsageError
from launcher.cli.options.accepted import NOTES
from launcher.cli.options.command import Command, Option, spelled
from launcher.cli.options.hosts import DEFAULT_HOSTFILE_NOTE, default_hostfile
from launcher.cli.options.run import read_options, run_options
from launcher.schedulers.detect import Allocation, SchedulerNode, StartedByHand, detect
from launcher.schedulers.rank import SchedulerRank

JOB_FILE_SUFFIXES = (".yaml", ".yml")
_HEADINGS_OF_LAUNCHERS = ("Ranks", "Hosts", "SSH")
_NAMES_OF_SCRIPTS = frozenset(("--module", "--include", "--exclude", "--setup", "--ssh", "--job-id"))  # theirs as well


@click.command(
    "run", cls=Command, details=("SSH", "Compatibility"), context_settings={"allow_interspersed_args": False}
)
@run_options
@click.pass_context
def run(ctx: click.Context, /, **values: Any) -> None:
    """Run SCRIPT on every rank (GPU) of this machine, of the hosts of a hostfile over SSH, or of a Slurm job.

    Everything after SCRIPT goes to the script untouched. The first rank that fails stops all others. SCRIPT may be a
    job file (.yaml) that holds all of it: see docs/launch.md.
    """
    if values["script"].endswith(JOB_FILE_SUFFIXES) and not (values["module"] or values["no_python"]):
        from launcher.cli.options.jobfile import with_job_file

        values = with_job_file(ctx, values)
    notes: list[str] = ctx.meta.get(NOTES, [])
    has_hosts = values["hostfile"] is not None
    started = StartedByHand() if _is_chosen(values) else detect(os.environ, hosts_are_named=has_hosts)
    if isinstance(started, SchedulerRank) and has_hosts:
        raise _started_several_times(started)
    if isinstance(started, SchedulerNode):
        values = _as_node(values, started)
        notes.append(started.note)
    elif isinstance(started, StartedByHand) and not (has_hosts or _is_chosen(values)):
        values = values | {"hostfile": default_hostfile()}
        notes += [started.note] if started.note is not None else []
        notes += [DEFAULT_HOSTFILE_NOTE] if values["hostfile"] is not None else []
    if misplaced := _misplaced(ctx, values["script_args"]):
        notes.append(f"{misplaced} goes to {values['script']}: options of launch stand before the script")
    in_slurm = isinstance(started, Allocation) or (isinstance(started, SchedulerRank) and started.is_task)
    options = read_options(values, notes, in_slurm=in_slurm)
    if isinstance(started, SchedulerRank):
        if started.local_world_size is None:  # nothing says which one of its host this is
            raise _started_several_times(started)
        from launcher.cli.task import run_task

        run_task(ctx, options, values, started)
        return
    from launcher.transport.local import LocalTransport

    local = LocalTransport(passes_stdin=True, setup=options.ssh.setup)
    try:
        # A setup does not end with its stdin, and Ctrl-C during the imports leaves at once.
        if options.request.is_here_only and not (options.dry_run or options.ssh.setup):
            local.start_ahead()  # the agent's interpreter starts while this one imports the rest
        from launcher.cli.launching import launch

        ctx.exit(launch(options, local))
    finally:
        local.close()


def _misplaced(ctx: click.Context, words: tuple[str, ...]) -> str | None:
    """Return the first word behind the script that is an option of ours, and hardly one of the script's own."""
    ours = [one for one in ctx.command.params if isinstance(one, Option) and one.heading in _HEADINGS_OF_LAUNCHERS]
    names = {name for one in ours for name in (*one.opts, *one.also)} - _NAMES_OF_SCRIPTS
    given = (word.partition("=")[0] for word in words if word.startswith("--"))
    return next((word for word in given if spelled(word) in names), None)


def _is_chosen(values: dict[str, Any]) -> bool:
    """Whether the options themselves say that the hosts are this machine alone, or one node of several."""
    return values["standalone"] or values["no_ssh"] or values["node_rank"] is not None


def _as_node(values: dict[str, Any], node: SchedulerNode) -> dict[str, Any]:
    """Return the values with what a scheduler says of this machine's part in a job; the command line wins."""
    found = {name: value for name, value in node.options().items() if value is not None and values[name] is None}
    return values | found


def _started_several_times(started: SchedulerRank) -> UsageError:
    launcher = started.program
    return UsageError(
        f"{started.started_by} has started this `launch` as process {started.rank} of {started.world_size}, and each"
        " would be a job of its own",
        hint=f"start it once, without {launcher}; or let {launcher} start the ranks: `{launcher} python train.py`;"
        " or start one on each node with --node-rank",
    )
