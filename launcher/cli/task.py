"""`launch run` as one of several processes that srun or mpirun has started: each becomes one rank."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from launcher.base import env
from launcher.base.errors import UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.scheduler_rank import SRUN, SchedulerRank
from launcher.base.signals import NOTICE_SIGNAL
from launcher.cli.options.command import Option
from launcher.cli.options.run import RunOptions
from launcher.job.scheduler_node import DEFAULT_PORT
from launcher.slurm.environment import read_task
from launcher.transport.command import own_argv

_WORKER_MODULE = "launcher.worker"
# What has a meaning where another launcher has started the ranks; any other option is refused, not ignored.
_OPTIONS_OF_A_TASK = (
    "script", "script_args", "module", "no_python", "pass_local_rank", "no_local_rank", "master_addr", "master_port",
    "resume", "engine", "quiet", "plain", "dry_run", "as_json",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One process of another launcher, as a rank."""

    started_by: str  # "srun", "mpirun"
    job: str  # for the start line
    rank: int
    local_rank: int
    local_world_size: int | None  # None: not known
    variables: dict[str, str]  # of the rank


def slurm_task(options: RunOptions) -> Task | None:
    """Return which task of `srun launch` this process is, None when it is none. Raises: HostfileError, UsageError."""
    task = read_task(os.environ) if options.request.in_slurm else None
    if task is None:
        return None
    variables = task.variables(options.request.master_addr, options.request.master_port)
    job = f"Slurm job {task.job_id}, step {task.step_id}"
    return Task(SRUN, job, task.rank, task.local_rank, task.local_world_size, variables)


def mpi_task(options: RunOptions, started: SchedulerRank) -> Task | None:
    """Return the rank that mpirun has made of this process, None when it does not say which one of its host.

    Raises: UsageError naming what must be exported.
    """
    if started.local_world_size is None:
        return None
    given = {env.MASTER_ADDR.name: options.request.master_addr, env.MASTER_PORT.name: options.request.master_port}
    chosen = {name: str(value) for name, value in given.items() if value is not None}
    variables = started.variables(os.environ | chosen, DEFAULT_PORT)
    variables[env.LOCAL_SIZE.name] = str(started.local_world_size)
    if started.is_one_host:  # else MPI does not say which node this is
        variables |= {known.name: "0" for known in (env.NODE_RANK, env.GROUP_RANK, env.CROSS_RANK)}
        variables[env.CROSS_SIZE.name] = "1"
    launcher = started.started_by.partition(" ")[0]
    local_rank = int(variables[env.LOCAL_RANK.name])
    return Task(launcher, started.started_by, started.rank, local_rank, started.local_world_size, variables)


def run_task(ctx: click.Context, options: RunOptions, values: Mapping[str, Any], task: Task) -> None:
    """Become the rank that `task` is; returns only after --dry-run. values: of the options, by name.

    Raises: UsageError for options that belong to a launcher which starts several ranks.
    """
    _refuse_options(ctx, values, task)
    request = options.request
    variables = task.variables | {env.ENGINE.name: request.engine}
    if request.resume:
        variables[env.RESUME.name] = request.resume
    if options.dry_run:
        click.echo(json.dumps(variables) if options.as_json else _summary(task, variables))
        return
    if task.rank == 0 and not options.output.quiet:
        click.echo(f"launch · {task.job} · {_summary(task, variables)}", err=True)
        if task.started_by == SRUN and _hides_gpus(task):
            click.echo("! one rank for each task of srun, a task here has several GPUs; see docs/slurm.md", err=True)
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, [NOTICE_SIGNAL])  # until the worker listens: it would kill the rank
    argv = [*own_argv(_WORKER_MODULE), *request.command.for_local_rank(task.local_rank)]
    os.execve(argv[0], argv, {**os.environ, **variables, "PYTHONUNBUFFERED": "1"})


def _refuse_options(ctx: click.Context, values: Mapping[str, Any], task: Task) -> None:
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
        num_tasks = task.variables[env.WORLD_SIZE.name]
        what = "tasks" if task.started_by == SRUN else "processes"
        raise UsageError(
            f"{spelling} has no meaning here: {task.started_by} has started {num_tasks} {what}, and each is one rank",
            hint="run `launch` without srun: it starts the ranks of all nodes of the allocation itself"
            if task.started_by == SRUN
            else f"leave it out, or run `launch` without {task.started_by}",
        )


def _summary(task: Task, variables: Mapping[str, str]) -> str:
    rank, world_size = variables[env.RANK.name], variables[env.WORLD_SIZE.name]
    master = f"{variables[env.MASTER_ADDR.name]}:{variables[env.MASTER_PORT.name]}"
    what = "task" if task.started_by == SRUN else "process"
    return f"rank {rank} of {world_size} (one for each {what} of {task.started_by}) · {master}"


def _hides_gpus(task: Task) -> bool:
    devices: Sequence[str] = [part for part in os.environ.get(env.CUDA_VISIBLE_DEVICES.name, "").split(",") if part]
    return task.local_world_size == 1 and len(devices) > 1
