"""From the options of `launch run` to a plan: which hosts, how they are reached, what every rank gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.errors import HostfileError, UsageError
from launcher.base.folders import home_folder, working_folder
from launcher.cli.options.hosts import DEFAULT_HOSTFILE, DEFAULT_HOSTFILE_NOTE
from launcher.cluster.cluster import Cluster, Host, Placement, place
from launcher.cluster.devices import local_device_tokens
from launcher.cluster.hostname import is_loopback
from launcher.job.envfile import job_environment
from launcher.job.environment import forwarded
from launcher.job.plan import Command, JobPlan
from launcher.transport.fanout import is_local

if TYPE_CHECKING:
    from launcher.cli.options.run import RunOptions
    from launcher.cli.reach import Reach
    from launcher.transport.api import Transport


_FOLDER_MAINS = ("__main__.py", "__main__.pyc")


@dataclass(frozen=True)
class Choice:
    """The hosts and slots to use, and what goes with them."""

    cluster: Cluster
    spares: tuple[Host, ...] = ()  # hosts that --num-nodes leaves out: they may take a lost one's place
    notes: tuple[str, ...] = ()  # what the user should know about the choice


def choose_hosts(options: RunOptions) -> Choice:
    """Return the hosts and slots the options ask for. Raises: HostfileError, UsageError."""
    if options.hostfile is not None or options.in_slurm:
        from launcher.cli.slurm import allocation
        from launcher.cluster.filters import select
        from launcher.cluster.hostfile import read_hostfile

        offered = read_hostfile(options.hostfile) if options.hostfile is not None else allocation(options.num_gpus)
        cluster = select(
            offered,
            include=options.include,
            exclude=options.exclude,
            num_nodes=options.num_nodes,
            num_gpus=options.num_gpus,
        )
        spares = offered.hosts[options.num_nodes :] if options.num_nodes is not None else ()
        notes = (DEFAULT_HOSTFILE_NOTE,) if options.hostfile == DEFAULT_HOSTFILE else ()
        return Choice(cluster, spares, notes)
    num_devices = len(local_device_tokens(os.environ))
    if num_devices == 0:
        if options.include or options.exclude:
            raise HostfileError(
                "--include and --exclude choose among GPUs or hosts, and there are neither",
                hint="name the hosts with --hostfile, or give --num-gpus N for N CPU ranks",
            )
        slots = tuple(range(options.num_gpus or 1))
        return Choice(_like_this(slots, options), notes=("no GPU here: the ranks run on the CPU",))
    from launcher.cluster.filters import select

    offered = Cluster((Host("localhost", tuple(range(num_devices))),))
    cluster = select(offered, include=options.include, exclude=options.exclude, num_gpus=options.num_gpus)
    return Choice(_like_this(cluster.hosts[0].slots, options))


def _like_this(slots: tuple[int, ...], options: RunOptions) -> Cluster:
    """Return this machine, or as many machines like it as `--node-rank` without a hostfile means."""
    if not options.is_by_hand:
        return Cluster((Host("localhost", slots),))
    return Cluster(tuple(Host(f"node-{number}", slots) for number in range(options.num_nodes or 1)))


def make_plan(options: RunOptions, cluster: Cluster, transports: Reach, job_id: str) -> JobPlan:
    """Decide everything about a run on `cluster`. Raises: UsageError, TransportError."""
    placement = place(cluster)
    if options.is_by_hand:
        placement = _one_node(options, placement)
    kinds = {node.node_rank: transports.for_host(node.host) for node in placement.nodes}
    names = {node_rank: transport.name for node_rank, transport in kinds.items()}
    if options.kind == "script" and "local" in names.values():
        _check_script(options.script)
    home, cwd = home_folder(), working_folder()
    standard = (*([home] if home is not None else []), Path(cwd))
    given = job_environment(options.env, options.env_files, os.environ, standard)
    tokens = local_device_tokens(os.environ)
    _check_local_slots(placement, names, len(tokens))
    return JobPlan(
        job_id=job_id,
        run_id=_run_id(options, placement),
        placement=placement,
        command=Command(options.kind, options.script, options.script_args, options.pass_local_rank),
        cwd=cwd,
        run_folder=options.log_dir / job_id,
        master_addr=_master_addr(options, placement, kinds, transports),
        master_port=options.master_port,
        transports=names,
        agent_commands={node.node_rank: kinds[node.node_rank].command_for(node.host) for node in placement.nodes},
        forwarded_env=forwarded(os.environ),
        given_env=given.values,
        notes=given.notes,
        device_tokens=tokens,
        grace_s=options.grace_s,
        lease_s=options.lease_s,
        hang_timeout_s=options.hang_timeout_s,
        stop_signals=options.stop_signals,
        saves_pid=options.save_pid,
        bound_cores=_bound_cores(options),
        max_restarts=options.max_restarts,
        engine=options.engine,
        resume=options.resumes_from,
    )


def _check_script(script: str) -> None:
    """Raise UsageError for what python could not run either: the agent would start for nothing."""
    if not os.path.exists(script):
        raise UsageError(f"script {script} does not exist", where=working_folder(), hint="check the path")
    if os.path.isdir(script) and not any(os.path.exists(os.path.join(script, name)) for name in _FOLDER_MAINS):
        raise UsageError(f"the folder {script} has no __main__.py", where=working_folder(), hint="name a file in it")


def _bound_cores(options: RunOptions) -> tuple[int, ...] | None:
    """Return the cores to share out, () for all, None for no binding. Raises: UsageError."""
    if not options.bind_core_list:
        return () if options.bind_cores else None
    from launcher.cluster.cores import parse_core_list

    return parse_core_list(options.bind_core_list)


def _run_id(options: RunOptions, placement: Placement) -> str | None:
    """Return what all nodes call the job, None where one command starts them all: the job's own id then."""
    if options.run_id is not None or not options.is_by_hand or placement.world_size == len(placement.ranks):
        return options.run_id
    return f"{options.master_addr}-{options.master_port}"  # what every node's command must name alike anyway


def _one_node(options: RunOptions, placement: Placement) -> Placement:
    """Return the placement as the one node sees it that this command starts. Raises: UsageError."""
    given = {"--master-addr": options.master_addr, "--master-port": options.master_port}
    missing = [name for name, value in given.items() if value is None]
    if missing and placement.num_nodes > 1:
        raise UsageError(
            f"nodes that are started by hand need {' and '.join(missing)}",
            hint="give every node the same address and port of node 0",
        )
    node_rank = options.node_rank
    if node_rank is None:
        own = [node.node_rank for node in placement.nodes if is_local(node.host.name)]
        if len(own) != 1:
            raise UsageError(
                f"--no-ssh: {os.uname().nodename} is not a host of the hostfile", hint="say which with --node-rank N"
            )
        node_rank = own[0]
    if node_rank >= placement.num_nodes:
        raise UsageError(f"--node-rank {node_rank}: there are only {placement.num_nodes} nodes, counted from 0")
    return placement.only(node_rank)


def _check_local_slots(placement: Placement, transports: dict[int, str], num_devices: int) -> None:
    for node in placement.nodes:
        too_many = [slot for slot in node.host.slots if slot >= num_devices > 0]
        if transports[node.node_rank] == "local" and too_many:
            raise UsageError(
                f"slot {too_many[0]} has no GPU: this process may use {num_devices}",
                where=node.host.name,
                hint="lower slots= or widen CUDA_VISIBLE_DEVICES",
            )


def _master_addr(options: RunOptions, placement: Placement, kinds: dict[int, Transport], transports: Reach) -> str:
    if options.master_addr is not None:
        return options.master_addr
    if placement.num_nodes == 1 or all(transport.name == "local" for transport in kinds.values()):
        return "127.0.0.1"
    first = placement.nodes[0].host
    if kinds[0].name == "local":
        if first.name == "localhost":
            raise UsageError(
                "other hosts cannot reach node 0 as localhost",
                hint="write this machine's own name into the hostfile, or give --master-addr",
            )
        return first.name
    address = transports.address_of(first)
    if address != first.name and is_loopback(address):
        raise UsageError(
            f"{address}, the HostName of {first.name} in the SSH config, leads other hosts to themselves",
            where=first.name,
            hint="give node 0's address in the network of the hosts with --master-addr",
        )
    return address


def config_argument(script_args: Sequence[str]) -> str | None:
    """Return the engine config that the script's arguments name, None when they name none."""
    for position, argument in enumerate(script_args):
        name, has_value, value = argument.partition("=")
        if name not in ("--deepspeed", "--deepspeed_config"):
            continue
        if has_value:
            return value
        following = script_args[position + 1] if position + 1 < len(script_args) else "--"
        if not following.startswith("-"):
            return following
    return None
