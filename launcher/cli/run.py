"""`launch run`: from options to a plan, from a plan to an exit code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from launcher.base.errors import HostfileError, UsageError
from launcher.cli import render
from launcher.cli.hosts import HostOptions
from launcher.cli.options import RunOptions, run_options
from launcher.cluster.cluster import Cluster, Host, place
from launcher.cluster.devices import local_device_tokens
from launcher.cluster.filters import select
from launcher.cluster.hostfile import read_hostfile
from launcher.job.controller import Controller
from launcher.job.environment import forwarded
from launcher.job.plan import Command, JobPlan, new_job_id
from launcher.job.registry import registered
from launcher.transport.api import Transport
from launcher.transport.fanout import is_local
from launcher.transport.local import LocalTransport
from launcher.transport.ssh import SshOptions, SshTransport

_CONFIG_OPTIONS = ("--deepspeed", "--deepspeed_config")


@click.command("run", context_settings={"allow_interspersed_args": False})
@run_options
@click.pass_context
def run(ctx: click.Context, /, **values: Any) -> None:
    """Start SCRIPT as ranks on this machine, or on the hosts of a hostfile over SSH.

    Everything after SCRIPT goes to the script untouched. The first rank that fails stops all others.
    """
    options = RunOptions(**values)
    cluster, notes = _cluster(options)
    transports = Transports(options)
    plan = _plan(options, cluster, transports)
    if options.dry_run:
        render.show_plan(plan, as_json=options.as_json)
        return
    console = render.Console(plan, quiet=options.quiet)
    for note in notes:
        console.note(note)
    try:
        with registered(plan, console.warning) as registration:
            report = Controller(plan, transports.for_host, console).run(lambda: check_config(options.script_args))
            registration.exit_code = report.exit_code
    finally:
        transports.close()
    console.finish(report)
    ctx.exit(report.exit_code)


class Transports:
    """The transport of each host: this machine's own, or one SSH transport for all others."""

    def __init__(self, options: RunOptions | HostOptions) -> None:
        self._only_ssh = options.force_multi
        self._local = LocalTransport()
        self._ssh = SshTransport(
            SshOptions(
                port=options.ssh_port,
                config_file=Path(options.ssh_config) if options.ssh_config else None,
                python=options.remote_python,
            )
        )

    def for_host(self, host: Host) -> Transport:
        """Return the transport that reaches `host`."""
        if is_local(host.name) and not self._only_ssh:
            return self._local
        return self._ssh

    def address_of(self, host: Host) -> str:
        """Return the address other nodes reach `host` by: HostName of the SSH config, else its name."""
        return self._ssh.target(host).address

    def close(self) -> None:
        """Close every connection."""
        self._ssh.close()
        self._local.close()


def _cluster(options: RunOptions) -> tuple[Cluster, list[str]]:
    """Return the hosts and slots to use, and what the user should know about the choice."""
    if options.hostfile is not None:
        cluster = read_hostfile(Path(options.hostfile))
        return (
            select(
                cluster,
                include=options.include,
                exclude=options.exclude,
                num_nodes=options.num_nodes,
                num_gpus=options.num_gpus,
            ),
            [],
        )
    num_devices = len(local_device_tokens(os.environ))
    if num_devices == 0:
        if options.include or options.exclude:
            raise HostfileError(
                "--include and --exclude choose among GPUs or hosts, and there are neither",
                hint="name the hosts with --hostfile, or give --num_gpus N for N CPU ranks",
            )
        num_ranks = options.num_gpus or 1
        return Cluster((Host("localhost", tuple(range(num_ranks))),)), ["no GPU here: the ranks run on the CPU"]
    cluster = Cluster((Host("localhost", tuple(range(num_devices))),))
    return select(cluster, include=options.include, exclude=options.exclude, num_gpus=options.num_gpus), []


def _plan(options: RunOptions, cluster: Cluster, transports: Transports) -> JobPlan:
    placement = place(cluster)
    job_id = new_job_id()
    kinds = tuple(transports.for_host(node.host) for node in placement.nodes)
    if options.kind == "script" and not Path(options.script).is_file() and "local" in {t.name for t in kinds}:
        raise UsageError(f"script {options.script} does not exist", where=os.getcwd(), hint="check the path")
    return JobPlan(
        job_id=job_id,
        placement=placement,
        command=Command(options.kind, options.script, options.script_args, options.pass_local_rank),
        cwd=os.getcwd(),
        run_folder=options.log_dir / job_id,
        master_addr=_master_addr(options, placement.nodes[0].host, kinds, transports),
        master_port=options.master_port,
        transports=tuple(transport.name for transport in kinds),
        agent_commands=tuple(
            transport.command_for(node.host) for transport, node in zip(kinds, placement.nodes, strict=True)
        ),
        forwarded_env=forwarded(os.environ),
        device_tokens=local_device_tokens(os.environ),
        grace_s=options.grace_s,
    )


def _master_addr(options: RunOptions, first: Host, kinds: Sequence[Transport], transports: Transports) -> str:
    if options.master_addr is not None:
        return options.master_addr
    if all(transport.name == "local" for transport in kinds):
        return "127.0.0.1"
    if kinds[0].name == "local":
        if first.name == "localhost":
            raise UsageError(
                "other hosts cannot reach node 0 as localhost",
                hint="write this machine's own name into the hostfile, or give --master_addr",
            )
        return first.name
    return transports.address_of(first)


def check_config(script_args: Sequence[str]) -> None:
    """Check the engine config among the script's arguments, so that a typo costs no start of all ranks.

    Raises: ConfigError.
    """
    path = _config_argument(script_args)
    if path is None or not Path(path).is_file():
        return
    from launcher.config.load import load_config  # pydantic: not for runs without a config

    load_config(path)


def _config_argument(script_args: Sequence[str]) -> str | None:
    for position, argument in enumerate(script_args):
        name, has_value, value = argument.partition("=")
        if name not in _CONFIG_OPTIONS:
            continue
        if has_value:
            return value
        following = script_args[position + 1] if position + 1 < len(script_args) else "--"
        if not following.startswith("-"):
            return following
    return None
