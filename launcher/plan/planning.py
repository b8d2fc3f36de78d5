"""From a request to a plan: which hosts, how each is reached, what every rank gets.

Values in, values out: only `Here.now`, `available_hosts` and a new `Job` look at what there is.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base import env
from launcher.base.errors import HostfileError, TransportError, UsageError
from launcher.base.fields import named
from launcher.base.folders import home_folder, working_folder
from launcher.cluster.cluster import Cluster, Host, Placement, place
from launcher.cluster.devices import given_devices, local_device_tokens
from launcher.cluster.nodeset import is_host, is_loopback
from launcher.fleet.transports import SshTransports, Transports
from launcher.journal.faults import KINDS, PREEMPT, Fault, parse_fault
from launcher.plan.engine_config import EngineConfig
from launcher.plan.plan import JobPlan, Settings, new_job_id
from launcher.plan.request import Request
from launcher.plan.variables import JobEnvironment, forwarded, job_environment
from launcher.schedulers.detect import in_allocation
from launcher.transport.local import LocalTransport, is_local

if TYPE_CHECKING:
    from launcher.sharding.mesh import MeshSizes
    from launcher.transport.ssh.options import SshOptions


@dataclass(frozen=True)
class Here:
    """What a plan depends on beside the request: this process and its machine, looked at once."""

    environ: Mapping[str, str]
    cwd: str
    device_tokens: tuple[str, ...]  # see cluster.devices
    num_cpus: int  # that this process may use
    hides_gpus: bool = False  # a variable says that this process uses none
    in_allocation: bool = False  # of Slurm, whatever hosts are chosen

    @classmethod
    def now(cls) -> Here:
        """Look. Raises: UsageError where the working folder is gone."""
        environ = dict(os.environ)
        tokens, num_cpus = local_device_tokens(environ), len(os.sched_getaffinity(0))
        hides_gpus, is_inside = given_devices(environ) == [], in_allocation(environ)
        return cls(environ, working_folder(), tokens, num_cpus, hides_gpus, is_inside)


@dataclass(frozen=True)
class HostSelection:
    """The hosts and slots to use, and what goes with them."""

    cluster: Cluster
    spares: tuple[Host, ...] = ()  # hosts that --num-nodes leaves out: they may take a lost one's place
    notes: tuple[str, ...] = ()  # what the user should know about the choice


def num_ranks(request: Request, here: Here) -> int | None:
    """Return how many ranks each host is to have, None for one on each slot. torchrun's words mean this machine.

    Raises: UsageError for `gpu` where there is none.
    """
    wish = request.num_gpus
    if not isinstance(wish, str):
        return wish
    if wish == "cpu":
        return here.num_cpus
    if request.has_hosts:
        return None  # these say themselves what slots they have
    num_gpus = len(here.device_tokens)
    if wish == "gpu" and not num_gpus:
        option = named("num_gpus")
        raise UsageError("this machine has no GPU", where=f"{option} gpu", hint=f"write {option} N for N CPU ranks")
    return num_gpus or here.num_cpus


def available_hosts(hostfile: str | None, *, in_slurm: bool, num_ranks: int | None = None) -> Cluster | None:
    """Return the hosts to choose from and their slots: those of a hostfile, or of the Slurm allocation.

    None where there is this machine alone. Reads files, and asks Slurm.
    num_ranks: slots of each host where Slurm gave no GPUs. Raises: HostfileError, UsageError.
    """
    if hostfile is not None:
        from launcher.cluster.hostfile import read_hostfile

        return read_hostfile(hostfile)
    if not in_slurm:
        return None
    from launcher.schedulers.slurm import read_allocation  # 7 ms that a command with a hostfile does not pay

    return read_allocation(os.environ, gpus_by_node=_gpus_by_node(), num_slots=num_ranks)


def _gpus_by_node() -> dict[str, int]:
    """Ask Slurm for the GPUs of every node: the environment knows this node's at best, and salloc's none at all."""
    from launcher.schedulers.slurm import parse_job_detail
    from launcher.slurm.queue import job_detail

    try:
        return parse_job_detail(job_detail(os.environ[env.SLURM_JOB_ID.name]))
    except (TransportError, HostfileError):
        return {}  # the environment has to do; read_allocation refuses what it cannot know


def choose_hosts(request: Request, here: Here, available: Cluster | None) -> HostSelection:
    """Return the hosts and slots to use. available: those of the hostfile or of Slurm; None: this machine.

    Raises: HostfileError, UsageError.
    """
    wanted = num_ranks(request, here)
    if available is not None:
        from launcher.cluster.filters import select

        count = None if request.num_nodes is None else request.num_nodes.of(len(available.hosts))
        cluster = select(
            available,
            include=request.include,
            exclude=request.exclude,
            num_nodes=count,
            num_gpus=wanted,
            source="Slurm" if request.in_slurm else "hostfile",
        )
        return HostSelection(cluster, available.hosts[count:] if count is not None else ())
    num_devices = len(here.device_tokens)
    if num_devices == 0 or request.num_gpus == "cpu":
        if request.include or request.exclude:
            raise HostfileError(
                f"{named('include')} and {named('exclude')} choose among GPUs or hosts, and there are neither",
                hint=f"name the hosts with {named('hostfile')}, or give {named('num_gpus')} N for N CPU ranks",
            )
        notes = ("no GPU here: the ranks run on the CPU",) if num_devices == 0 else ()
        return HostSelection(_like_this(tuple(range(wanted or 1)), request), notes=notes)
    from launcher.cluster.filters import select

    machine = Cluster((Host("localhost", tuple(range(num_devices))),))
    cluster = select(machine, include=request.include, exclude=request.exclude, num_gpus=wanted)
    return HostSelection(_like_this(cluster.hosts[0].slots, request))


def _like_this(slots: tuple[int, ...], request: Request) -> Cluster:
    """Return this machine, or as many machines like it as `--node-rank` without a hostfile means."""
    if not request.runs_one_node:
        return Cluster((Host("localhost", slots),))
    num_nodes = 1 if request.num_nodes is None else request.num_nodes.most
    return Cluster(tuple(Host(f"node-{number}", slots) for number in range(num_nodes)))


def transport_kind(request: Request, host: Host) -> str:
    """Return how a host is reached: "local", "ssh" or "srun"."""
    if request.in_slurm:
        return "srun"
    is_here = request.runs_one_node or (is_local(host.name) and not request.force_multi)
    return "local" if is_here else "ssh"


def make_plan(
    request: Request,
    here: Here,
    cluster: Cluster,
    job_id: str,
    given: JobEnvironment,
    address_of: Callable[[Host], str],
) -> JobPlan:
    """Decide everything about a run on `cluster`.

    given: the variables of --env and of files. address_of: returns the address that other hosts reach one by.
    Raises: UsageError, and what `address_of` raises.
    """
    placement = place(cluster)
    if request.runs_one_node:
        placement = _one_node(request, placement)
    kinds = {node.node_rank: transport_kind(request, node.host) for node in placement.nodes}
    tokens = here.device_tokens
    if here.hides_gpus or (request.num_gpus == "cpu" and not request.has_hosts):
        tokens = ("",) * (1 + max(slot for node in placement.nodes for slot in node.host.slots))
    else:
        _check_local_slots(placement, kinds, len(tokens))
    settings = {field.name: getattr(request, field.name) for field in dataclasses.fields(Settings)}
    faults = _faults(request, placement.world_size)
    return JobPlan(
        **settings | {"run_id": _run_id(request, placement), "faults": tuple(map(str, faults))},
        job_id=job_id,
        placement=placement,
        command=request.command,
        cwd=here.cwd,
        run_folder=request.log_dir / job_id,
        master_addr=_master_addr(request, placement, kinds, address_of),
        master_port=request.master_port,
        transports=kinds,
        forwarded_env=forwarded(here.environ),
        given_env=given.values,
        notes=(*request.notes, *given.notes, *map(_fault_note, faults)),
        device_tokens=tokens,
    )


def _faults(request: Request, world_size: int) -> list[Fault]:
    """Return the faults to be rehearsed, with their ranks. Raises: UsageError."""
    faults = []
    for text in request.faults:
        fault = parse_fault(text)
        rank = world_size - 1 if fault.rank is None else fault.rank
        if rank >= world_size:
            raise UsageError(
                f"there is no rank {rank} in a world of {world_size}",
                where=f"{named('faults')} {text}",
                hint=f"name a rank from 0 to {world_size - 1}",
            )
        faults.append(Fault(fault.kind, fault.step, rank))
    return faults


def _fault_note(fault: Fault) -> str:
    where = "" if fault.kind == PREEMPT else f" on rank {fault.rank}"
    return f"a fault is rehearsed ({named('faults')} {fault}): after step {fault.step}{where} {KINDS[fault.kind]}"


def _run_id(request: Request, placement: Placement) -> str | None:
    """Return what all nodes call the job, None where one command starts them all: the job's own id then."""
    if request.run_id is not None or not request.runs_one_node or placement.world_size == len(placement.ranks):
        return request.run_id
    return f"{request.master_addr}-{request.master_port}"  # what every node's command must name alike anyway


def _one_node(request: Request, placement: Placement) -> Placement:
    """Return the placement as the one node sees it that this command starts. Raises: UsageError."""
    missing = [named(name) for name in ("master_addr", "master_port") if getattr(request, name) is None]
    if missing and placement.num_nodes > 1:
        raise UsageError(
            f"several nodes, each with its own command, need {' and '.join(missing)}",
            hint="give every node the same address and port of node 0",
        )
    node_rank = request.node_rank
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


def _master_addr(
    request: Request, placement: Placement, kinds: dict[int, str], address_of: Callable[[Host], str]
) -> str:
    if request.master_addr is not None:
        if not is_host(request.master_addr):
            raise UsageError(
                f'{named("master_addr")} "{request.master_addr}" is not the name or address of a host',
                hint=f"such as node-a, 10.0.0.7 or fe80::1%eth0; a port is for {named('master_port')}",
            )
        if is_loopback(request.master_addr):
            _check_reaches_itself(request.master_addr, placement, kinds, address_of)
        return request.master_addr
    if placement.num_nodes == 1 or set(kinds.values()) == {"local"}:
        return "127.0.0.1"
    first = placement.nodes[0].host
    if kinds[0] == "local":
        if first.name == "localhost":
            raise UsageError(
                "other hosts cannot reach node 0 as localhost",
                hint=f"write this machine's own name into the hostfile, or give {named('master_addr')}",
            )
        return first.name
    address = address_of(first)
    if address != first.name and is_loopback(address):
        raise UsageError(
            f"{address}, the HostName of {first.name} in the SSH config, leads other hosts to themselves",
            where=first.name,
            hint=f"give node 0's address in the network of the hosts with {named('master_addr')}",
        )
    return address


def _check_reaches_itself(
    address: str, placement: Placement, kinds: dict[int, str], address_of: Callable[[Host], str]
) -> None:
    """Check that hosts which meet at a loopback address are one machine, as far as their names tell.

    Raises: UsageError, and what `address_of` raises.
    """
    if placement.num_nodes == 1:
        return
    for node in placement.nodes:
        name = node.host.name
        is_far = kinds[node.node_rank] == "ssh" and not (is_local(name) or is_loopback(name))
        if is_far and not is_loopback(address_of(node.host)):
            raise UsageError(
                f"{address} leads every host to itself, and {name} is another machine",
                where=named("master_addr"),
                hint="give node 0's address in the network of the hosts, or leave it out",
            )


class Job:
    """The hosts of a request, how they are reached, and the plans made for them; `job.restart.run_job` runs it."""

    def __init__(
        self,
        request: Request,
        here: Here,
        ssh: SshOptions,
        *,
        hosts: Cluster | None = None,
        local: LocalTransport | None = None,
        job_id: str | None = None,
        run_folder: Path | None = None,
    ) -> None:
        """Choose the hosts and read the environment of the ranks; nothing is started, and no host is connected to.

        hosts: to choose from, in place of those that the request names. local: reaches this machine. job_id,
        run_folder: given where they are known before the job. Raises: LauncherError.
        """
        self.request, self.here = request, here
        if hosts is None:
            hosts = available_hosts(request.hostfile, in_slurm=request.in_slurm, num_ranks=num_ranks(request, here))
        self.selection = choose_hosts(request, here, hosts)
        home = home_folder()
        folders = (*([home] if home is not None else []), Path(here.cwd))
        self._environment = job_environment(request.env, request.env_files, here.environ, folders)
        self.config = EngineConfig(request.command.arguments)
        self._job_id = job_id or new_job_id()
        self._run_folder = run_folder
        self.transports: Transports
        if request.in_slurm:
            from launcher.slurm.srun import SrunTransport  # not for other jobs

            self.transports = SrunTransport.of(ssh, self.selection.cluster)
        else:
            self.transports = SshTransports(
                ssh, only_local=request.runs_one_node, only_ssh=request.force_multi, local=local
            )

    def plan(self, cluster: Cluster | None = None) -> JobPlan:
        """Return the plan for the chosen hosts, or for those of a restart. Raises: LauncherError."""
        plan = make_plan(
            # Faults are rehearsed at the first start only: their ranks may be gone with a host.
            self.request if cluster is None else dataclasses.replace(self.request, faults=()),
            self.here,
            cluster or self.selection.cluster,
            self._job_id,
            self._environment,
            self.transports.address_of,
        )
        notes = self.transports.notes_on([node.host for node in plan.placement.nodes])
        return dataclasses.replace(plan, notes=(*plan.notes, *notes), run_folder=self._run_folder or plan.run_folder)

    def mesh_of(self, plan: JobPlan) -> MeshSizes | None:
        """Return the mesh of a plan's ranks, None where the script names no config. Raises: ConfigError."""
        return self.config.check(plan.placement, is_here=plan.is_here)

    def close(self) -> None:
        """Close every connection."""
        self.transports.close()
