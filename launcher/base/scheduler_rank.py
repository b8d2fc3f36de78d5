"""Which rank mpirun, mpiexec or srun has made this process, told by the environment variables each of them sets.

Pure: environment mappings in, values out. A script that one of them starts N times must never become N worlds of one,
and `launch` that one of them starts N times must never become N jobs.

The variables are documented by Open MPI ("Environment variables"), MVAPICH2 (user guide, "Runtime parameters"), MPICH's
Hydra ("Using the Hydra process manager"), and the manual page of srun ("OUTPUT ENVIRONMENT VARIABLES").
"""

from __future__ import annotations

from launcher.base import env
from launcher.base.errors import UsageError
from launcher.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# Below the range from which Linux takes ports for outgoing connections, so that no connection holds it by chance.
_FIRST_PORT, _NUM_PORTS = 12_000, 20_000
# Steps above are not srun's: the batch script, the external and the interactive step.
_MAX_STEP_ID = 0xFFFF_FFF0
_MAX_DIGITS = 10
_MAX_NODES = 65_536  # more are a typo
# Who sets them; rank, world size, local rank, local world size.
_MPI = (
    ("mpirun (Open MPI)", env.OMPI_RANK, env.OMPI_SIZE, env.OMPI_LOCAL_RANK, env.OMPI_LOCAL_SIZE),
    ("mpirun (MVAPICH2)", env.MV2_RANK, env.MV2_SIZE, env.MV2_LOCAL_RANK, env.MV2_LOCAL_SIZE),
    ("mpiexec (MPICH or Intel MPI)", env.PMI_RANK, env.PMI_SIZE, env.MPI_LOCALRANKID, env.MPI_LOCALNRANKS),
)
SRUN = "srun"


class SchedulerRank(Record):
    """One of several processes of one job that another launcher has started."""

    started_by: str  # for messages; `SRUN` is Slurm
    rank: int
    world_size: int
    local_rank: int | None  # None: not said
    local_world_size: int | None
    first_node: str | None  # name of the node of rank 0, None when it is not said
    port: int | None  # that all ranks of this job derive alike, None where nothing distinguishes the job
    node_rank: int | None = None  # None: not said
    num_nodes: int | None = None

    @property
    def program(self) -> str:
        """What has started it, in one word."""
        return self.started_by.partition(" ")[0]

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.local_world_size == self.world_size

    def variables(self, environ: Mapping[str, str], default_port: int) -> dict[str, str]:
        """Return the variables of a process group that `environ` lacks or, of rank and size, all of them.

        default_port: where the job has no port of its own. Raises: UsageError naming what a user must export.
        """
        node_rank, num_nodes = (0, 1) if self.is_one_host else (self.node_rank, self.num_nodes)
        values = {
            env.LOCAL_RANK: self.local_rank,
            env.LOCAL_WORLD_SIZE: self.local_world_size,
            env.LOCAL_SIZE: self.local_world_size,
            env.NODE_RANK: node_rank,
            env.GROUP_RANK: node_rank,
            env.CROSS_RANK: node_rank,
            env.CROSS_SIZE: num_nodes,
            env.MASTER_ADDR: "127.0.0.1" if self.is_one_host else self.first_node,
            env.MASTER_PORT: self.port or default_port,
        }
        found = {known.name: str(value) for known, value in values.items() if value is not None}
        found |= {known.name: environ[known.name] for known in values if known.name in environ}
        for needed, what in (
            (env.LOCAL_RANK, "its number on this host"),
            (env.MASTER_ADDR, "the host of rank 0"),
        ):
            if needed.name not in found:
                raise UsageError(
                    f"{self.started_by} has started this process as rank {self.rank} of {self.world_size},"
                    f" and {what} is not known",
                    where=needed.name,
                    hint=f"export {needed.name}, or start the ranks with `launch --hostfile`",
                )
        return found | {env.RANK.name: str(self.rank), env.WORLD_SIZE.name: str(self.world_size)}


def scheduler_rank(environ: Mapping[str, str]) -> SchedulerRank | None:
    """Return which of several ranks another launcher has made this process, None when there is one process.

    Ranks that `launch` has started are none: the launcher's own node agents may run under srun.
    Raises: UsageError when the variables contradict each other, or do not say how many ranks there are.
    """
    if env.JOB_ID.name in environ:
        return None
    mpi, task = _mpi_rank(environ), _srun_task(environ)
    # Under `srun --mpi=...` both describe this process. Under mpirun inside Slurm the task of srun is mpirun's own
    # daemon, and the first one counts.
    is_same = mpi is None or (task is not None and (mpi.rank, mpi.world_size) == (task.rank, task.world_size))
    found = task if is_same else mpi
    if found is None and env.PMIX_RANK.name in environ:
        raise UsageError(
            "PMIx says that this is one of the ranks of a job, and not how many there are",
            where=env.PMIX_RANK.name,
            hint="export RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or use `launch` or mpirun",
        )
    if found is None or found.world_size < 2:
        return None
    if found is task:
        _check_task(environ, found)
    return found


def parse_counts(text: str, name: str) -> tuple[int, ...]:
    """Expand Slurm's `2(x3),1` to (2, 2, 2, 1); `name` is the variable, for errors. Raises: UsageError."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, repeat = part.removesuffix(")").partition("(x")
        is_well_formed = part in (count, f"{count}(x{repeat})") and all(map(_is_number, (count, repeat or "1")))
        if not is_well_formed or int(repeat or 1) + len(counts) > _MAX_NODES:
            raise UsageError(
                f'"{text[:80]}" is not a list of counts', where=name, hint='expected for example "2(x3),1"'
            )
        counts += [int(count)] * int(repeat or 1)
    return tuple(counts)


def is_srun_step(environ: Mapping[str, str]) -> bool:
    """Whether srun has started this process as a task: a batch script and a shell of salloc are none."""
    step_id = environ.get(env.SLURM_STEP_ID.name, "")
    has_tasks = env.SLURM_STEP_NUM_TASKS.name in environ
    return has_tasks and _is_number(step_id) and int(step_id) < _MAX_STEP_ID


def _mpi_rank(environ: Mapping[str, str]) -> SchedulerRank | None:
    for started_by, rank, size, local_rank, local_size in _MPI:
        if rank.name not in environ or size.name not in environ:
            continue
        nodes = environ.get(env.SLURM_JOB_NODELIST.name)
        return _checked(
            SchedulerRank(
                started_by,
                number_in(environ, rank),
                number_in(environ, size),
                number_in(environ, local_rank) if local_rank.name in environ else None,
                number_in(environ, local_size) if local_size.name in environ else None,
                _first_node(nodes) if nodes else None,
                _port_of_job(environ),
            ),
            rank,
        )
    return None


def _srun_task(environ: Mapping[str, str]) -> SchedulerRank | None:
    if not is_srun_step(environ):
        return None
    nodes = environ.get(env.SLURM_STEP_NODELIST.name) or environ.get(env.SLURM_JOB_NODELIST.name)
    rank, size = number_in(environ, env.SLURM_PROCID), number_in(environ, env.SLURM_STEP_NUM_TASKS)
    local_rank, node_rank = (
        number_in(environ, known) if known.name in environ else None for known in (env.SLURM_LOCALID, env.SLURM_NODEID)
    )
    counts = _tasks_per_node(environ)
    here = (counts[node_rank : node_rank + 1] or (0,))[0] if counts and node_rank is not None else None
    first, port = _first_node(nodes) if nodes else None, _port_of_job(environ)
    found = SchedulerRank(SRUN, rank, size, local_rank, here, first, port, node_rank, len(counts) or None)
    return _checked(found, env.SLURM_PROCID)


def _tasks_per_node(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the number of srun's tasks on each node, () where it is not said. Raises: UsageError."""
    name = env.SLURM_STEP_TASKS_PER_NODE.name
    return parse_counts(environ[name], name) if name in environ else ()


def _check_task(environ: Mapping[str, str], task: SchedulerRank) -> None:
    """Raises: UsageError for a task of srun that cannot be one of the step's."""
    counts, here = _tasks_per_node(environ), task.local_world_size
    if counts and (sum(counts) != task.world_size or (here is not None and (task.local_rank or 0) >= here)):
        raise UsageError(
            f"Slurm's variables contradict each other: task {task.rank} of {task.world_size} on node {task.node_rank},"
            f" tasks per node {environ[env.SLURM_STEP_TASKS_PER_NODE.name]}",
            where=env.SLURM_STEP_TASKS_PER_NODE.name,
            hint="start the script or `launch` by srun itself, without changing SLURM_* variables",
        )


def _port_of_job(environ: Mapping[str, str]) -> int | None:
    """Return a port that two jobs on one host hardly share, None where the environment names no job."""
    job_id, step_id = (environ.get(known.name, "") for known in (env.SLURM_JOB_ID, env.SLURM_STEP_ID))
    if (namespace := environ.get(env.PMIX_NAMESPACE.name)) and not is_srun_step(environ):
        import zlib

        return _FIRST_PORT + zlib.crc32(namespace.encode("utf-8", "surrogateescape")) % _NUM_PORTS
    if _is_number(job_id) and is_srun_step(environ):
        return _FIRST_PORT + (int(job_id) * 31 + int(step_id)) % _NUM_PORTS
    return None


def _first_node(nodes: str) -> str:
    """Return the first name of `gpu[01-03,7],login2`: gpu01."""
    name, position = "", 0
    while position < len(nodes) and nodes[position] != ",":
        if nodes[position] != "[":
            name, position = name + nodes[position], position + 1
            continue
        inside, _, rest = nodes[position + 1 :].partition("]")
        name += inside.partition(",")[0].partition("-")[0]
        position = len(nodes) - len(rest)
    return name


def _checked(found: SchedulerRank, where: env.EnvVar) -> SchedulerRank:
    """Raises: UsageError for a rank that is none of the job's."""
    if found.rank >= found.world_size:
        raise UsageError(
            f"{found.started_by} says that this is rank {found.rank} of {found.world_size}",
            where=where.name,
            hint="start the script by one launcher, without changing its variables",
        )
    return found


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


def number_in(environ: Mapping[str, str], variable: env.EnvVar) -> int:
    """Return the number that a variable holds. Raises: UsageError."""
    text = environ.get(variable.name, "")
    if not _is_number(text):
        raise UsageError(
            f'"{text[:80]}" is not a number' if text else "the variable is not set",
            where=variable.name,
            hint="start the script by one launcher, without changing its variables",
        )
    return int(text)
