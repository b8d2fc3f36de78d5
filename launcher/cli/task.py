"""`launch run` as one of several processes that srun or mpirun has started: each becomes one rank."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from launcher.base import env
from launcher.base.errors import UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.signals import NOTICE_SIGNAL
from launcher.cli.options.command import Option
from launcher.cli.options.run import RunOptions
from launcher.schedulers.detect import DEFAULT_PORT
from launcher.schedulers.rank import SchedulerRank
from launcher.schedulers.slurm import refuse_heterogeneous
from launcher.transport.command import own_argv

_WORKER_MODULE = "launcher.worker"
# What has a meaning where another launcher has started the ranks; any other option is refused, not ignored.
_OPTIONS_OF_A_TASK = (
    "script", "script_args", "module", "no_python", "pass_local_rank", "no_local_rank", "master_addr", "master_port",
    "resume", "engine", "quiet", "plain", "dry_run", "as_json",
)  # fmt: skip


def run_task(ctx: click.Context, options: RunOptions, values: Mapping[str, Any], task: SchedulerRank) -> None:
    """Become the rank that `task` is; returns only after --dry-run. values: of the options, by name.

    Raises: UsageError for options that belong to a launcher which starts several ranks, and for a missing variable.
    """
    if task.is_task:
        refuse_heterogeneous(os.environ)
    _refuse_options(ctx, values, task)
    request = options.request
    given = {env.MASTER_ADDR.name: request.master_addr, env.MASTER_PORT.name: request.master_port}
    # srun says all of it for every task; mpirun may leave something to what is exported.
    known = {} if task.is_task else dict(os.environ)
    known |= {name: str(value) for name, value in given.items() if value is not None}
    variables = task.variables(known, DEFAULT_PORT) | {env.ENGINE.name: request.engine}
    if request.resume:
        variables[env.RESUME.name] = request.resume
    if options.dry_run:
        click.echo(json.dumps(variables) if options.as_json else _summary(task, variables))
        return
    if task.rank == 0 and not options.output.quiet:
        click.echo(f"launch · {_job(task)} · {_summary(task, variables)}", err=True)
        if task.is_task and _hides_gpus(task):
            click.echo("! one rank for each task of srun, a task here has several GPUs; see docs/slurm.md", err=True)
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, [NOTICE_SIGNAL])  # until the worker listens: it would kill the rank
    argv = [*own_argv(_WORKER_MODULE), *request.command.for_local_rank(int(variables[env.LOCAL_RANK.name]))]
    os.execve(argv[0], argv, {**os.environ, **variables, "PYTHONUNBUFFERED": "1"})


def _refuse_options(ctx: click.Context, values: Mapping[str, Any], task: SchedulerRank) -> None:
    for param in ctx.command.params:
        name = str(param.name)
        value = values.get(name)
        source = ctx.get_parameter_source(name)
        is_default = source is ParameterSource.DEFAULT and value == ctx.params.get(name)  # not from a job file
        if not value or name in _OPTIONS_OF_A_TASK or source is ParameterSource.ENVIRONMENT or is_default:
            continue
        if task.rank != 0:  # all tasks have the same options, and one of them says so
            ctx.exit(ExitCode.USAGE)
        spelling = param.spelling if isinstance(param, Option) else name
        what = f"{task.world_size} {'tasks' if task.is_task else 'processes'}"
        raise UsageError(
            f"{spelling} has no meaning here: {task.program} has started {what}, and each is one rank",
            hint="run `launch` without srun: it starts the ranks of all nodes of the allocation itself"
            if task.is_task
            else f"leave it out, or run `launch` without {task.program}",
        )


def _job(task: SchedulerRank) -> str:
    if not task.is_task:
        return task.started_by
    return f"Slurm job {os.environ[env.SLURM_JOB_ID.name]}, step {os.environ[env.SLURM_STEP_ID.name]}"


def _summary(task: SchedulerRank, variables: Mapping[str, str]) -> str:
    master = f"{variables[env.MASTER_ADDR.name]}:{variables[env.MASTER_PORT.name]}"
    what = "task" if task.is_task else "process"
    return f"rank {task.rank} of {task.world_size} (one for each {what} of {task.program}) · {master}"


def _hides_gpus(task: SchedulerRank) -> bool:
    devices: Sequence[str] = [part for part in os.environ.get(env.CUDA_VISIBLE_DEVICES.name, "").split(",") if part]
    return task.local_world_size == 1 and len(devices) > 1
