"""`launch run`: what a line means, and which of the ways to start ranks it asks for.

All of them but the common one, a job on this machine, are imported when they are used.
"""

from __future__ import annotations

import os
from typing import Any

import click

from launcher.base.errors import UsageError
from launcher.base.scheduler_rank import SRUN, SchedulerRank, scheduler_rank
from launcher.cli.options.command import Command
from launcher.cli.options.hosts import default_hostfile
from launcher.cli.options.run import RunOptions, num_ranks, run_options
from launcher.slurm.allocation import in_allocation

JOB_FILE_SUFFIXES = (".yaml", ".yml")


@click.command(
    "run", cls=Command, context_settings={"allow_interspersed_args": False}, short_help="Start SCRIPT as ranks."
)
@run_options
@click.pass_context
def run(ctx: click.Context, /, **values: Any) -> None:
    """Start SCRIPT as ranks on this machine, or on the hosts of a hostfile over SSH.

    Everything after SCRIPT goes to the script untouched. The first rank that fails stops all others. SCRIPT may be a
    job file (.yaml) that holds all of it: see docs/launch.md.
    """
    if values["script"].endswith(JOB_FILE_SUFFIXES) and not (values["module"] or values["no_python"]):
        from launcher.cli.options.jobfile import with_job_file

        values = with_job_file(ctx, values)
    values = _with_default_hostfile(values)
    has_hosts = values["hostfile"] is not None or (in_allocation(os.environ) and not values["standalone"])
    options = RunOptions(**values | {"num_gpus": num_ranks(values["num_gpus"], has_hosts=has_hosts)})
    started = None if options.is_by_hand or options.standalone else scheduler_rank(os.environ)
    if started is not None and not (options.in_slurm and started.started_by == SRUN):
        raise _started_several_times(started)
    if options.in_slurm:
        from launcher.cli import slurm

        task = slurm.task_of(options)
        if task is not None:
            slurm.run_task(ctx, options, task)
            return
    from launcher.transport.local import LocalTransport

    local = LocalTransport(passes_stdin=True)
    try:
        if options.is_here_only and not options.dry_run:
            local.start_ahead()  # the agent's interpreter starts while this one imports the rest
        from launcher.cli.launching import launch

        ctx.exit(launch(options, local))
    finally:
        local.close()


def _with_default_hostfile(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with DeepSpeed's hostfile where it is there and nothing else says which hosts are meant."""
    is_chosen = values["hostfile"] is not None or values["standalone"] or values["no_ssh"]
    if is_chosen or values["node_rank"] is not None or in_allocation(os.environ):
        return values
    return values | {"hostfile": default_hostfile()}


def _started_several_times(started: SchedulerRank) -> UsageError:
    launcher = started.started_by.partition(" ")[0]
    return UsageError(
        f"{started.started_by} has started this `launch` as process {started.rank} of {started.world_size}, and each"
        " would be a job of its own",
        hint=f"start it once, without {launcher}; or let {launcher} start the ranks: `{launcher} python train.py`;"
        " or start one on each node with --node-rank",
    )
