"""From the options of `launch run` to a plan, from a plan to an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from launcher.cli.console import render, streams
from launcher.cli.planning import choose_hosts, config_argument, make_plan
from launcher.cli.reach import Transports
from launcher.job.controller import Controller
from launcher.job.display import Display
from launcher.job.plan import new_job_id
from launcher.job.registry import registered
from launcher.job.restart import RestartPolicy, run_with_restarts
from launcher.job.signals import SignalQueue
from launcher.slurm.allocation import in_allocation

if TYPE_CHECKING:
    from launcher.cli.console.live import LiveView
    from launcher.cli.options.run import RunOptions
    from launcher.cli.reach import Reach
    from launcher.cluster.cluster import Cluster
    from launcher.config.schema import Config
    from launcher.job.outcome import RunReport
    from launcher.job.plan import JobPlan
    from launcher.transport.local import LocalTransport

_STILL_SHOWING = "waiting for standard output to be read (Ctrl-C: leave; everything is in {}/)"


def launch(options: RunOptions, local: LocalTransport) -> int:
    """Plan the run, run it to its end and return its exit code. local: reaches this machine; the caller closes it.

    Raises: LauncherError when nothing could be started.
    """
    chosen = choose_hosts(options)
    transports = _reach(options, chosen.cluster, local)
    job_id = new_job_id()

    def plan_for(cluster: Cluster) -> JobPlan:
        return make_plan(options, cluster, transports, job_id)

    plan = plan_for(chosen.cluster)
    if options.dry_run:
        render.show_plan(plan, as_json=options.as_json)
        if not options.as_json:
            click.echo("nothing was started (--dry-run)")
        return 0
    console = render.Console(
        plan,
        log_level="warning" if options.quiet else options.log_level,
        live=_live_view(options, plan),
        has_prefixes=not options.no_prefix,
    )
    policy = RestartPolicy(
        options.max_restarts,
        # Slurm takes the nodes of a job back after a notice: there the batch script has the job queued again.
        options.max_restarts > 0 and not in_allocation(os.environ),
        options.min_nodes,
        chosen.spares,
        lambda: world_sizes_of(options.script_args),
    )
    display, signals = Display(console), SignalQueue(plan.stop_signals)

    def say_still_showing() -> None:
        streams.say_if_possible(_STILL_SHOWING.format(plan.run_folder))

    def run_plan(plan: JobPlan) -> RunReport:
        display.wait_for_room(signals, say_still_showing)
        transports.prepare([node.host for node in plan.placement.nodes])
        return Controller(plan, transports.for_host, display, signals).run(
            lambda: check_config(options.script_args, plan.placement.world_size)
        )

    for note in (*chosen.notes, *plan.notes):
        display.put(console.note, note)
    with signals.listening():  # once for all runs: no signal may find the defaults between two of them
        try:
            with registered(plan, display.warning) as registration:
                report = run_with_restarts(plan, policy, run_plan, plan_for, display, signals)
                registration.exit_code = report.exit_code
            display.put(console.finish, report)
        finally:
            transports.close()
            display.put(console.close)
            display.close(signals, say_still_showing)
    display.check()
    return report.exit_code


def _reach(options: RunOptions, cluster: Cluster, local: LocalTransport) -> Reach:
    if options.in_slurm:
        from launcher.cli.slurm import AllocationTransports

        return AllocationTransports(options, cluster)
    return Transports(options, only_local=options.is_by_hand, only_ssh=options.force_multi, local=local)


def _live_view(options: RunOptions, plan: JobPlan) -> LiveView | None:
    """Return a panel for a run whose stdout is a terminal that can hold one, else None."""
    is_capable = os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    if not (options.wants_panel and is_capable and sys.stdout.isatty()):
        return None
    from launcher.cli.console.live import LiveView

    return LiveView(plan)


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
