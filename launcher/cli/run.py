"""`launch run`: from options to a plan, from a plan to an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from launcher.cli import render, slurm
from launcher.cli.jobfile import SUFFIXES, read_job_file
from launcher.cli.live import live_view
from launcher.cli.options import RunOptions, run_options
from launcher.cli.planning import choose_hosts, config_argument, make_plan
from launcher.cli.reach import Reach, Transports
from launcher.cluster.cluster import Cluster
from launcher.job.controller import Controller
from launcher.job.plan import JobPlan, new_job_id
from launcher.job.registry import registered
from launcher.job.report import RunReport
from launcher.job.restart import RestartPolicy, run_with_restarts

if TYPE_CHECKING:
    from launcher.config.schema import Config


@click.command("run", context_settings={"allow_interspersed_args": False})
@run_options
@click.pass_context
def run(ctx: click.Context, /, **values: Any) -> None:
    """Start SCRIPT as ranks on this machine, or on the hosts of a hostfile over SSH.

    Everything after SCRIPT goes to the script untouched. The first rank that fails stops all others. SCRIPT may be a
    job file (.yaml) that holds all of it: see docs/launch.md.
    """
    if Path(values["script"]).suffix in SUFFIXES and not (values["module"] or values["no_python"]):
        values = _with_job_file(ctx, values)
    options = RunOptions(**values)
    task = slurm.task_of(options)
    if task is not None:
        slurm.run_task(ctx, options, task)
        return
    chosen = choose_hosts(options)
    transports = _reach(options, chosen.cluster)
    job_id = new_job_id()

    def plan_for(cluster: Cluster) -> JobPlan:
        return make_plan(options, cluster, transports, job_id)

    plan = plan_for(chosen.cluster)
    if options.dry_run:
        render.show_plan(plan, as_json=options.as_json)
        if not options.as_json:
            click.echo("nothing was started (--dry-run)")
        return
    live = live_view(plan) if options.wants_panel else None
    console = render.Console(plan, log_level="error" if options.quiet else options.log_level, live=live)
    for note in chosen.notes:
        console.note(note)

    def run_plan(plan: JobPlan) -> RunReport:
        transports.prepare([node.host for node in plan.placement.nodes])
        return Controller(plan, transports.for_host, console).run(
            lambda: check_config(options.script_args, plan.placement.world_size)
        )

    policy = RestartPolicy(
        options.max_restarts, options.min_nodes, chosen.spares, lambda: world_sizes_of(options.script_args)
    )
    try:
        with registered(plan, console.warning) as registration:
            report = run_with_restarts(plan, policy, run_plan, plan_for, console)
            registration.exit_code = report.exit_code
    finally:
        transports.close()
        console.close()
    console.finish(report)
    ctx.exit(report.exit_code)


def _reach(options: RunOptions, cluster: Cluster) -> Reach:
    if options.in_slurm:
        return slurm.AllocationTransports(options, cluster)
    return Transports(options.ssh_options, only_local=options.is_by_hand, only_ssh=options.force_multi)


def _with_job_file(ctx: click.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a job file under those that were given on the command line."""
    from_file = read_job_file(Path(values["script"]), ctx.command)
    if values["script_args"]:
        from_file["script_args"] = (*from_file["script_args"], *values["script_args"])
    from_file["env"] = (*from_file["env"], *values["env"])
    merged = dict(values)
    for name, value in from_file.items():
        is_ours = name in ("script", "script_args", "env")
        if is_ours or ctx.get_parameter_source(name) is ParameterSource.DEFAULT:
            merged[name] = value
    return merged


def check_config(script_args: Sequence[str], world_size: int) -> None:
    """Check the engine config among the script's arguments, so that a typo costs no start of all ranks.

    The world size is checked against `elasticity` alone: the script may still change the batch keys.
    Raises: ConfigError.
    """
    config = _config_of(script_args)
    if config is not None and config.elasticity.enabled is True:
        _config_of(script_args, world_size)


def world_sizes_of(script_args: Sequence[str]) -> tuple[int, ...] | None:
    """Return the world sizes that the config among the script's arguments fits, None when it fits any.

    Raises: ConfigError.
    """
    config = _config_of(script_args)
    if config is None:
        return None
    from launcher.config.elastic import elastic_batch_of

    batch = elastic_batch_of(config)
    return None if batch is None else batch.world_sizes


def _config_of(script_args: Sequence[str], world_size: int | None = None) -> Config | None:
    """Load the config among the script's arguments; None when there is none, or it is on other hosts only."""
    source = config_argument(script_args)
    if source is None:
        return None
    from launcher.config.load import is_readable_here, load_config  # pydantic: not for runs without a config

    return load_config(source, world_size=world_size).config if is_readable_here(source) else None
