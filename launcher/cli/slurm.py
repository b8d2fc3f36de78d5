"""`launch run` inside Slurm: an allocation in place of a hostfile, or one task of srun as one rank."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Protocol

import click
from click.core import ParameterSource

from launcher.base import env
from launcher.base.errors import HostfileError, TransportError, UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.signals import NOTICE_SIGNAL
from launcher.cli.options.command import Option
from launcher.cli.options.run import RunOptions
from launcher.cluster.cluster import Cluster, Host
from launcher.job.plan import Command
from launcher.slurm.environment import SlurmTask, parse_job_detail, read_allocation, read_task
from launcher.slurm.queue import job_detail
from launcher.slurm.srun import SrunTransport
from launcher.transport.command import own_argv

_WORKER_MODULE = "launcher.worker"
# What has a meaning where srun has already started the ranks; any other option is refused, not ignored.
_OPTIONS_OF_A_TASK = (
    "script", "script_args", "module", "no_python", "pass_local_rank", "no_local_rank", "master_addr", "master_port",
    "resume", "engine", "quiet", "plain", "dry_run", "as_json",
)  # fmt: skip


class AllocationOptions(Protocol):
    """What reaching the nodes of an allocation depends on."""

    @property
    def shell_setup(self) -> str:
        """Shell text that runs on a host first."""

    @property
    def remote_python(self) -> str | None:
        """Python on the other nodes; None: this one's path."""


class AllocationTransports:
    """One srun step reaches every host of a run; a restart gets a new one."""

    def __init__(self, options: AllocationOptions, cluster: Cluster) -> None:
        if options.shell_setup:
            raise UsageError(
                "--setup and --venv-script are for hosts reached over SSH; srun passes this environment on",
                hint="put the commands into the batch script, before `launch`",
            )
        self._python = options.remote_python
        self._srun = SrunTransport([host for host in cluster.hosts if host.slots], python=self._python)

    def prepare(self, hosts: Sequence[Host]) -> None:
        """Begin a new step with the next host that is opened."""
        self._srun.close()
        self._srun = SrunTransport(hosts, python=self._python)

    def for_host(self, host: Host) -> SrunTransport:
        """Return the transport that reaches `host`."""
        return self._srun

    def address_of(self, host: Host) -> str:
        """Return the address other nodes reach `host` by: its node name."""
        return host.name

    def close(self) -> None:
        """End every step."""
        self._srun.close()


def allocation(num_gpus: int | None) -> Cluster:
    """Return the hosts of the allocation. num_gpus: ranks of each host where Slurm gave no GPUs.

    Raises: HostfileError, UsageError.
    """
    return read_allocation(os.environ, gpus_by_node=_gpus_by_node(), num_slots=num_gpus)


def _gpus_by_node() -> dict[str, int]:
    """Ask Slurm for the GPUs of every node: the environment knows this node's at best, and salloc's none at all."""
    try:
        return parse_job_detail(job_detail(os.environ[env.SLURM_JOB_ID.name]))
    except (TransportError, HostfileError):
        return {}  # the environment has to do; read_allocation refuses what it cannot know


def task_of(options: RunOptions) -> SlurmTask | None:
    """Return which task of `srun launch` this process is, None when it is none. Raises: HostfileError, UsageError."""
    return read_task(os.environ) if options.in_slurm else None


def run_task(ctx: click.Context, options: RunOptions, task: SlurmTask) -> None:
    """Become the rank that this task of srun is; returns only after --dry-run.

    Raises: UsageError for options that belong to a launcher which starts several ranks.
    """
    for param in ctx.command.params:
        name = str(param.name)
        value = getattr(options, name)
        is_ours = name in _OPTIONS_OF_A_TASK or ctx.get_parameter_source(name) is ParameterSource.ENVIRONMENT
        if value and value != param.default and not is_ours:
            if task.rank != 0:  # all tasks have the same options, and one of them says so
                ctx.exit(ExitCode.USAGE)
            spelling = param.spelling if isinstance(param, Option) else name
            raise UsageError(
                f"{spelling} has no meaning here: srun has started {task.world_size} tasks, and each is one rank",
                hint="run `launch` without srun: it starts the ranks of all nodes of the allocation itself",
            )
    variables = task.variables(options.master_addr, options.master_port) | {env.ENGINE.name: options.engine}
    if options.resume is not None:
        variables[env.RESUME.name] = options.resumes_from
    command = Command(options.kind, options.script, options.script_args, options.pass_local_rank)
    if options.dry_run:
        click.echo(json.dumps(variables) if options.as_json else _summary(variables))
        return
    if task.rank == 0 and not options.quiet:
        click.echo(f"launch · Slurm job {task.job_id}, step {task.step_id} · {_summary(variables)}", err=True)
        if _hides_gpus(task):
            click.echo("! one rank for each task of srun, a task here has several GPUs; see docs/slurm.md", err=True)
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, [NOTICE_SIGNAL])  # until the worker listens: it would kill the rank
    argv = [*own_argv(_WORKER_MODULE), *command.for_local_rank(task.local_rank)]
    os.execve(argv[0], argv, {**os.environ, **variables, "PYTHONUNBUFFERED": "1"})


def _summary(variables: dict[str, str]) -> str:
    rank, world_size = variables[env.RANK.name], variables[env.WORLD_SIZE.name]
    master = f"{variables[env.MASTER_ADDR.name]}:{variables[env.MASTER_PORT.name]}"
    return f"rank {rank} of {world_size} (one for each task of srun) · {master}"


def _hides_gpus(task: SlurmTask) -> bool:
    devices: Sequence[str] = [part for part in os.environ.get(env.CUDA_VISIBLE_DEVICES.name, "").split(",") if part]
    return task.local_world_size == 1 and len(devices) > 1
