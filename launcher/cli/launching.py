"""Run what the options of `launch run` ask for: a request, a plan, its transports, an exit code."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.base.errors import UsageError
from launcher.base.secrets import mask_arguments
from launcher.cli.console import render, streams
from launcher.fleet.signals import SignalQueue
from launcher.job.display import Display
from launcher.job.restart import run_job
from launcher.metrics.export import Exports
from launcher.plan.planning import Here, Job
from launcher.plan.request import DEFAULT_LOG_DIR
from launcher.registry.registry import registered

if TYPE_CHECKING:
    from launcher.cli.console.live import LiveView
    from launcher.cli.options.run import RunOptions
    from launcher.fleet.transports import Transports
    from launcher.plan.plan import JobPlan
    from launcher.plan.request import Request
    from launcher.transport.local import LocalTransport

_STILL_SHOWING = "waiting for standard output to be read (Ctrl-C: leave; everything is in {}/)"
_FOLDER_MAINS = ("__main__.py", "__main__.pyc")
_MAX_FIRST_LINE_BYTES = 256


def launch(options: RunOptions, local: LocalTransport) -> int:
    """Plan the run, run it to its end and return its exit code. local: reaches this machine; the caller closes it.

    Raises: LauncherError when nothing could be started.
    """
    request, here = options.request, Here.now()
    if not options.dry_run:
        request = _with_writable_logs(request, here.cwd)
    job = Job(request, here, options.ssh, local=local)
    plan = job.plan()
    _check_script(plan)
    _check_local_ranks(options, plan)
    if options.dry_run:
        plan = _with_commands(plan, job.transports)
        sizes = job.mesh_of(plan)
        if sizes is not None and not sizes.is_data_alone:
            plan = dataclasses.replace(
                plan, notes=(*plan.notes, f"mesh        {sizes.text(plan.placement.hosts_of_ranks)}")
            )
        render.show_plan(plan, options.ssh.setup, as_json=options.as_json, has_whole_commands=options.ssh.verbose)
        if not options.as_json:
            click.echo("nothing was started (--dry-run)")
        return 0
    if options.output.level == "debug":
        plan = _with_commands(plan, job.transports)
    console = render.Console(plan, options.output, live=_live_view(options, plan))
    if options.ssh.verbose:
        from launcher.cli.console.trace import show_messages

        show_messages()
    exports = Exports(plan)
    signals, still_showing = SignalQueue(plan.stop_signals), _STILL_SHOWING.format(plan.run_folder)
    display = Display(exports.beside(console), signals, lambda: streams.say_if_possible(still_showing))
    for note in (*job.selection.notes, *plan.notes, *exports.notes):
        display.put(console.note, note)
    exports.begin(display.warning)
    with signals.listening(is_last=True):  # once for all runs: no signal may find the defaults between two of them
        try:
            with registered(plan, display.warning) as registration:
                report = run_job(job, plan, display, signals)
                registration.exit_code = report.exit_code
            display.put(exports.close, report)
            display.put(console.finish, report)
        finally:
            job.close()
            display.put(exports.close)
            display.put(console.close)
            display.close()
    display.check()
    return report.exit_code


def _check_local_ranks(options: RunOptions, plan: JobPlan) -> None:
    """Raise UsageError for a local rank that no node has: the option would do nothing."""
    num_ranks_of_node = max(node.num_ranks for node in plan.placement.nodes)
    for option, named in options.output.local_ranks.items():
        wrong = [rank for rank in sorted(named) if rank >= num_ranks_of_node]
        if wrong:
            raise UsageError(
                f"no node has a local rank {wrong[0]}", where=option, hint=f"use 0 to {num_ranks_of_node - 1}"
            )


def _live_view(options: RunOptions, plan: JobPlan) -> LiveView | None:
    """Return a panel for a run whose stdout is a terminal that can hold one, else None."""
    if not options.wants_panel or streams.columns_of(1) is None:
        return None
    from launcher.cli.console.live import LiveView

    return LiveView(plan)


def _with_commands(plan: JobPlan, transports: Transports) -> JobPlan:
    """Return the plan with the commands that start its agents, to be shown."""
    commands = {node.node_rank: transports.for_host(node.host).command_for(node.host) for node in plan.placement.nodes}
    return dataclasses.replace(plan, agent_commands=commands)


def _check_script(plan: JobPlan) -> None:
    """Raise UsageError for what python could not run either: the agent would start for nothing."""
    if plan.command.kind != "script" or "local" not in plan.transports.values():
        return
    script = plan.command.target
    try:
        os.stat(script)
    except PermissionError:
        raise UsageError(
            f"script {script} cannot be read: one of its folders may not be entered",
            where=plan.cwd,
            hint=f"namei -l {shlex.quote(os.path.abspath(script))} shows which",
        ) from None
    except (OSError, ValueError):
        hint = _without_python(plan) or "check the path"
        raise UsageError(f"script {script} does not exist", where=plan.cwd, hint=hint) from None
    if os.path.isdir(script):
        if not any(os.path.exists(os.path.join(script, name)) for name in _FOLDER_MAINS):
            raise UsageError(f"the folder {script} has no __main__.py", where=plan.cwd, hint="name a file in it")
    elif (kind := _foreign_kind(script)) is not None:
        path = shlex.quote(script if "/" in script else f"./{script}")
        hint = _without_python(plan) or f"--no-python runs it as it is: launch --no-python {path}"
        raise UsageError(f"{script} is {kind}, not a Python script", where=plan.cwd, hint=hint)


def _foreign_kind(script: str) -> str | None:
    """Return what a file is that Python cannot run, None for all that it may."""
    try:
        with open(script, "rb") as file:
            first, second = file.readline(_MAX_FIRST_LINE_BYTES), file.readline(_MAX_FIRST_LINE_BYTES)
    except OSError:
        return None  # python says why
    if first.startswith(b"\x7fELF"):
        return "a program"
    # Scripts that pip installs begin as ones of sh where the path of their python is long.
    is_both = second.startswith((b"'''", b'"""'))
    return (
        "a script of another language" if first.startswith(b"#!") and b"python" not in first and not is_both else None
    )


def _without_python(plan: JobPlan) -> str | None:
    """Return a hint where the script is python itself, None elsewhere."""
    if not re.fullmatch(r"python[\d.]*", os.path.basename(plan.command.target)):
        return None
    words = shlex.join(mask_arguments(plan.command.arguments))
    return f"leave python out: launch {words}".rstrip()


def _with_writable_logs(request: Request, cwd: str) -> Request:
    """Return the request with its logs in a temporary folder where the default one cannot be made."""
    wanted = Path(cwd, request.log_dir)
    there = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
    if request.log_dir != DEFAULT_LOG_DIR or os.access(there, os.W_OK | os.X_OK):
        return request
    import tempfile

    try:
        folder = Path(tempfile.mkdtemp(prefix="launch-runs-"))
    except OSError:
        return request  # the error of the run folder says what to do
    note = f"{there} cannot be written: the logs are in {folder}; --log-dir chooses another folder"
    return dataclasses.replace(request, log_dir=folder, notes=(*request.notes, note))
