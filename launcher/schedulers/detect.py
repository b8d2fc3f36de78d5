"""What has started this process: another launcher, a scheduler of nodes, Slurm, or a user; by environment variables.

Pure: environment mappings in, values out. The variables of nodes are documented by torchrun (PET_*, which Kubernetes'
training operators set), by PyTorchJob (MASTER_ADDR, WORLD_SIZE, RANK), Azure ML, Vertex AI and Lightning (NODE_RANK),
and by MPI (`schedulers.rank`). Slurm is not among them: there one `launch` starts all nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.base import env
from launcher.base.errors import UsageError
from launcher.base.fields import MAX_PORT
from launcher.cluster.cluster import NodeRange
from launcher.cluster.nodeset import split_endpoint
from launcher.schedulers.rank import SchedulerRank, scheduler_rank

DEFAULT_PORT = 29500  # torchrun's
_ALONE = "; --standalone: use this machine only"


@dataclass(frozen=True)
class StartedByHand:
    """Nothing says that this process is a part of a job."""

    note: str | None = None  # what to tell the user: it may be a part of something all the same


@dataclass(frozen=True)
class Allocation:
    """This process runs inside a Slurm allocation, and may start ranks on all of its nodes."""


@dataclass(frozen=True)
class SchedulerNode:
    """This machine as one node of a job; every other node runs a command of its own."""

    known_by: str  # what says so, for messages
    node_rank: int
    num_nodes: int
    master_addr: str | None  # None: there is one node
    master_port: int | None  # None: there is one node, and any port will do
    num_ranks: int | str | None = None  # of this node: a number, "gpu", "cpu", "auto"; None: not said

    @property
    def note(self) -> str:
        """What to tell the user."""
        place = f"node {self.node_rank} of {self.num_nodes}"
        ranks = "" if self.num_ranks is None else f", ranks: {self.num_ranks}"
        return f"{self.known_by}: this is {place}{ranks}{_ALONE if self.num_nodes > 1 else ''}"

    def options(self) -> dict[str, object]:
        """Return the options of `launch run` that say the same, by name."""
        if self.num_nodes == 1:
            return {"num_gpus": self.num_ranks, "master_port": self.master_port}
        return {
            "num_gpus": self.num_ranks,
            "num_nodes": NodeRange(self.num_nodes, self.num_nodes),
            "node_rank": self.node_rank,
            "master_addr": self.master_addr,
            "master_port": self.master_port,
        }


def detect(
    environ: Mapping[str, str], *, hosts_are_named: bool = False
) -> SchedulerRank | SchedulerNode | Allocation | StartedByHand:
    """Return what has started this process.

    hosts_are_named: the user says which hosts to use; only a launcher that has started several of us is looked for.
    Raises: UsageError when the variables contradict each other or lack one.
    """
    rank = scheduler_rank(environ)
    if hosts_are_named:
        return rank or StartedByHand()
    if in_allocation(environ) and (rank is None or rank.is_task):
        return rank or Allocation()
    node = scheduler_node(environ, rank)
    if rank is not None and (node is None or node.num_nodes == 1):  # several would start all ranks each
        return rank
    return node or StartedByHand(_foreign_rank(environ))


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Return whether this process runs inside a Slurm allocation whose hosts are its to use.

    A rank that starts `launch` itself is not meant: its hosts already run the job it belongs to. A shell of salloc in a
    heterogeneous job knows no node list of the whole job, and is inside all the same.
    """
    if env.JOB_ID.name in environ:
        return False
    has_nodes = env.SLURM_JOB_ID.name in environ and env.SLURM_JOB_NODELIST.name in environ
    return has_nodes or env.SLURM_HET_SIZE.name in environ


def scheduler_node(environ: Mapping[str, str], started: SchedulerRank | None) -> SchedulerNode | None:
    """Return which node this machine is, None when nothing says that it is one.

    started: what MPI says of this process. Raises: UsageError when the variables contradict each other or lack one.
    """
    if env.JOB_ID.name in environ:
        return None
    if any(known.name in environ for known in (env.PET_NNODES, env.PET_NODE_RANK, env.PET_NPROC_PER_NODE)):
        return _of_torchrun(environ)
    if started is not None and started.local_world_size == 1:
        return _of_mpi(environ, started)
    is_rank = any(known.name in environ for known in (env.LOCAL_RANK, env.TORCHELASTIC_RUN_ID))
    if started is not None or is_rank or env.MASTER_ADDR.name not in environ:
        return None
    return _of_variables(environ)


def _of_torchrun(environ: Mapping[str, str]) -> SchedulerNode:
    """Read what torchrun would read: PET_ and the name of an option."""
    count = environ.get(env.PET_NNODES.name, "1")
    least, _, most = count.partition(":")
    if most and most != least:
        raise UsageError(
            f"{env.PET_NNODES.name}={count}: an elastic job has its nodes numbered by torchrun's rendezvous",
            where=env.PET_NNODES.name,
            hint="give the job a fixed number of nodes",
        )
    num_nodes = _number(env.PET_NNODES, least)
    node_rank = _agreed(environ, (env.PET_NODE_RANK, env.NODE_RANK, env.GROUP_RANK)) if num_nodes > 1 else 0
    endpoint, port = split_endpoint(environ.get(env.PET_RDZV_ENDPOINT.name, ""))
    address = environ.get(env.PET_MASTER_ADDR.name) or endpoint or environ.get(env.MASTER_ADDR.name)
    port = "" if port in (None, "0") else port  # 0: any free one
    own, common = environ.get(env.PET_MASTER_PORT.name), environ.get(env.MASTER_PORT.name)
    ports = [(env.PET_MASTER_PORT, own), (env.PET_RDZV_ENDPOINT, port)]
    ports += [(env.MASTER_PORT, common)] if num_nodes > 1 else []  # on one node torchrun leaves that out, too
    ranks = environ.get(env.PET_NPROC_PER_NODE.name)
    is_word = ranks in ("gpu", "cpu", "auto")
    num_ranks = ranks if is_word or ranks is None else _number(env.PET_NPROC_PER_NODE, ranks)
    return _checked("PET_* variables", node_rank, num_nodes, (address, _first_port(*ports)), num_ranks)


def _of_mpi(environ: Mapping[str, str], started: SchedulerRank) -> SchedulerNode:
    """Read one process of mpirun on each node: it starts all ranks of its node."""
    address = environ.get(env.MASTER_ADDR.name) or started.first_node
    port = _first_port((env.MASTER_PORT, environ.get(env.MASTER_PORT.name))) or started.port
    by = f"{started.started_by}, one process on each node"
    return _checked(by, started.rank, started.world_size, (address, port), None)


def _of_variables(environ: Mapping[str, str]) -> SchedulerNode | None:
    """Read MASTER_ADDR with the number of this node, and how many there are."""
    numbers: tuple[env.EnvVar, ...] = (env.NODE_RANK, env.GROUP_RANK)
    if not any(known.name in environ for known in numbers):
        numbers = (env.RANK,)  # without LOCAL_RANK: the scheduler's number of this machine
        if env.RANK.name not in environ or env.WORLD_SIZE.name not in environ:
            return None
    node_rank = _agreed(environ, numbers)
    local = environ.get(env.LOCAL_WORLD_SIZE.name)
    num_ranks = None if local is None else _number(env.LOCAL_WORLD_SIZE, local)
    counted = env.NNODES if env.NNODES.name in environ else env.WORLD_SIZE
    if counted.name not in environ:
        raise UsageError(
            f"{numbers[0].name} and {env.MASTER_ADDR.name} say that this is a node of a job, not how many there are",
            where=env.NNODES.name,
            hint=f"export {env.NNODES.name}, or give --num-nodes and --node-rank{_ALONE}",
        )
    num_nodes = _num_nodes(environ, counted, num_ranks)
    _check_rank(environ, numbers[0], node_rank, num_nodes)
    if num_nodes <= 1 and node_rank == 0:
        return None  # left over in a shell, or a job of one process
    names = [known.name for known in numbers if known.name in environ] + [counted.name, env.MASTER_ADDR.name]
    master = (environ[env.MASTER_ADDR.name], _first_port((env.MASTER_PORT, environ.get(env.MASTER_PORT.name))))
    return _checked(", ".join(names), node_rank, num_nodes, master, num_ranks)


def _num_nodes(environ: Mapping[str, str], counted: env.EnvVar, num_ranks: int | None) -> int:
    """Return how many nodes there are. Raises: UsageError when the numbers of nodes and ranks contradict each other."""
    number = _number(counted, environ[counted.name])
    if env.WORLD_SIZE.name not in environ or (not num_ranks and counted is env.WORLD_SIZE):
        return number
    world_size = _number(env.WORLD_SIZE, environ[env.WORLD_SIZE.name])
    if not num_ranks:
        problem = f"{world_size} ranks are not a multiple of {number} nodes" if number and world_size % number else None
    elif counted is env.WORLD_SIZE:
        problem = (
            f"{world_size} ranks are not a multiple of {num_ranks} on each node" if world_size % num_ranks else None
        )
        number = world_size // num_ranks
    else:
        fits = world_size in (number, number * num_ranks)  # some schedulers count nodes in it
        problem = None if fits else f"{number} nodes with {num_ranks} ranks each are not {world_size} ranks"
    if problem is not None:
        where = ", ".join(dict.fromkeys((counted.name, env.LOCAL_WORLD_SIZE.name, env.WORLD_SIZE.name)))
        hint = f"fix the variables, or give --num-nodes and --node-rank{_ALONE}"
        raise UsageError(problem, where=where, hint=hint)
    return number


def _check_rank(environ: Mapping[str, str], counted: env.EnvVar, node_rank: int, num_nodes: int) -> None:
    """Raises: UsageError where RANK is neither the number of this node nor a rank on it."""
    if counted is env.RANK or env.RANK.name not in environ:
        return
    rank = _number(env.RANK, environ[env.RANK.name])
    world_size = _number(env.WORLD_SIZE, environ.get(env.WORLD_SIZE.name, "0"))
    num_ranks = _number(env.LOCAL_WORLD_SIZE, environ.get(env.LOCAL_WORLD_SIZE.name, "0"))
    num_ranks = num_ranks or world_size // max(num_nodes, 1)
    if rank != node_rank and not (num_ranks and rank // num_ranks == node_rank):
        raise UsageError(
            f"{counted.name}={node_rank} and {env.RANK.name}={rank} contradict each other",
            where=env.RANK.name,
            hint=f"fix the variables, or give --node-rank{_ALONE}",
        )


def _foreign_rank(environ: Mapping[str, str]) -> str | None:
    """Return what to say where another launcher has made this process one of several ranks, None elsewhere.

    What it started is `launch`: once for each of its ranks, and each would be a job of its own.
    """
    own = (env.LOCAL_RANK, env.RANK, env.WORLD_SIZE)
    if env.JOB_ID.name in environ or not all(known.name in environ for known in own):
        return None
    rank, world_size = environ[env.RANK.name], environ[env.WORLD_SIZE.name]
    if world_size in ("", "0", "1"):
        return None
    return (
        f"the environment says that this is rank {rank} of {world_size} of another launcher: this `launch` is a job of"
        " its own, and does not read that; to train as that rank run `python SCRIPT`"
    )


def _checked(
    known_by: str,
    node_rank: int,
    num_nodes: int,
    master: tuple[str | None, int | None],
    num_ranks: int | str | None,
) -> SchedulerNode:
    """Raises: UsageError for a node that is none of the job's, or a job without a master."""
    address, port = master
    if node_rank >= max(num_nodes, 1):
        raise UsageError(
            f"this is node {node_rank} of {num_nodes}, counted from 0",
            where=known_by,
            hint=f"fix the variables, or give --num-nodes and --node-rank{_ALONE}",
        )
    if num_nodes > 1 and not address:
        raise UsageError(
            f"this is node {node_rank} of {num_nodes}, and the address of node 0 is not known",
            where=known_by,
            hint=f"export {env.MASTER_ADDR.name} on every node, or give --node-rank and --master-addr",
        )
    default = DEFAULT_PORT if num_nodes > 1 else None
    return SchedulerNode(known_by, node_rank, max(num_nodes, 1), address, port or default, num_ranks)


def _first_port(*said: tuple[env.EnvVar, str | None]) -> int | None:
    """Return the port of the first variable that says one. Raises: UsageError, with that variable."""
    for variable, text in said:
        if text:
            port = _number(variable, text)
            if not 1 <= port <= MAX_PORT:
                raise UsageError(
                    f"port {port} is not from 1 to {MAX_PORT}", where=variable.name, hint="fix the variable"
                )
            return port
    return None


def _agreed(environ: Mapping[str, str], variables: tuple[env.EnvVar, ...]) -> int:
    """Return the number that all variables say that are set. Raises: UsageError when two differ, or none is set."""
    found = {known: _number(known, environ[known.name]) for known in variables if known.name in environ}
    if not found:
        raise UsageError(
            "the job has several nodes, and the number of this one is not known",
            where=variables[0].name,
            hint=f"export it on every node, from 0, or give --node-rank{_ALONE}",
        )
    if len(set(found.values())) > 1:
        raise UsageError(
            " and ".join(f"{known.name}={number}" for known, number in found.items()) + " contradict each other",
            where=variables[0].name,
            hint=f"fix the variables, or give --node-rank{_ALONE}",
        )
    return next(iter(found.values()))


def _number(variable: env.EnvVar, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise UsageError(f'"{text[:80]}" is not a number', where=variable.name, hint="fix the variable")
    return int(text)
