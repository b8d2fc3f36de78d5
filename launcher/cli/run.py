"""`launch run`: what a line means, and which of the ways to start ranks it asks for.

All of them but the common one, a job on this machine, are imported when they are used.
"""

from __future__ import annotations

from typing import Any

import click

from launcher.cli.options import RunOptions, run_options

JOB_FILE_SUFFIXES = (".yaml", ".yml")


@click.command("run", context_settings={"allow_interspersed_args": False}, short_help="Start SCRIPT as ranks.")
@run_options
@click.pass_context
def run(ctx: click.Context, /, **values: Any) -> None:
    """Start SCRIPT as ranks on this machine, or on the hosts of a hostfile over SSH.

    Everything after SCRIPT goes to the script untouched. The first rank that fails stops all others. SCRIPT may be a
    job file (.yaml) that holds all of it: see docs/launch.md.
    """
    if values["script"].endswith(JOB_FILE_SUFFIXES) and not (values["module"] or values["no_python"]):
        from launcher.cli.jobfile import with_job_file

        values = with_job_file(ctx, values)
    options = RunOptions(**values)
    if options.in_slurm:
        from launcher.cli import slurm

        task = slurm.task_of(options)
        if task is not None:
            slurm.run_task(ctx, options, task)
            return
    from launcher.transport.local import LocalTransport

    local = LocalTransport()
    try:
        if options.is_here_only and not options.dry_run:
            local.start_ahead()  # the agent's interpreter starts while this one imports the rest
        from launcher.cli.launching import launch

        ctx.exit(launch(options, local))
    finally:
        local.close()
