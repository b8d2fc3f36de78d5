"""What Slurm's environment variables say of an allocation: its hosts and their slots.

Pure: environment mappings and text in, values out. The variables are described in the manual page of sbatch
("OUTPUT ENVIRONMENT VARIABLES"); the forms here are those of Slurm 20.11 and newer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher.base import env
from launcher.base.errors import HostfileError, UsageError
from launcher.base.fields import named
from launcher.cluster.cluster import MAX_EXPANSION, Cluster, Host
from launcher.cluster.nodeset import expand
from launcher.schedulers.rank import number_of, parse_counts

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_HINT = "Slurm sets it: start `launch` in a batch script, in salloc, or by srun"
_NUMBER = re.compile(r"\d{1,9}")
_GRES_GPU = re.compile(r"(?:^|,)gpu(?::[A-Za-z][^:,()]*)?:(\d{1,9})")
_JOB_DETAIL = re.compile(r"^\s*Nodes=(\S{1,65536}) .*?GRES=(\S*)", re.MULTILINE)


def read_allocation(
    environ: Mapping[str, str], *, gpus_by_node: Mapping[str, int] | None = None, num_slots: int | None = None
) -> Cluster:
    """Return the hosts of the allocation with one slot for each GPU; without GPUs one for each task.

    gpus_by_node: what Slurm itself says (`parse_job_detail`); None or {} when it is not known.
    num_slots: slots of hosts without GPUs, in place of the tasks.
    Raises: HostfileError for a node list that cannot be read, UsageError for counts that cannot and for a
    heterogeneous job.
    """
    refuse_heterogeneous(environ)
    nodes = parse_nodelist(environ.get(env.SLURM_JOB_NODELIST.name, ""))
    expected = environ.get(env.SLURM_JOB_NUM_NODES.name)
    if expected is not None and number_of(environ, env.SLURM_JOB_NUM_NODES, _HINT) != len(nodes):
        raise UsageError(
            f"the node list has {len(nodes)} nodes, {env.SLURM_JOB_NUM_NODES.name} says {expected}",
            where=env.SLURM_JOB_NODELIST.name,
            hint="unset the SLURM_* variables that do not come from Slurm",
        )
    gpus = _gpus(environ, nodes, gpus_by_node or {})
    if any(gpus):
        return Cluster(tuple(Host(name, tuple(range(n))) for name, n in zip(nodes, gpus, strict=True)))
    tasks = (num_slots,) * len(nodes) if num_slots is not None else _tasks(environ, len(nodes))
    return Cluster(tuple(Host(name, tuple(range(n))) for name, n in zip(nodes, tasks, strict=True)))


def refuse_heterogeneous(environ: Mapping[str, str]) -> None:
    """Refuse a job of several parts (`salloc A : B`, `#SBATCH hetjob`): no variable describes all of its nodes.

    Raises: UsageError.
    """
    num_parts = environ.get(env.SLURM_HET_SIZE.name)
    if num_parts is not None:
        raise UsageError(
            f"this Slurm job is heterogeneous: its {num_parts} parts have their own nodes and GPUs each",
            where=env.SLURM_HET_SIZE.name,
            hint="ask for one part that has all nodes (--nodes, --gres), or name the hosts of all parts with"
            f" {named('hostfile')} (over SSH)",
        )


def parse_nodelist(text: str) -> tuple[str, ...]:
    """Expand `gpu[01-03,7],login2`. Raises: HostfileError for what is not a list of different node names."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text):
        names.extend(expand(part.strip()))
        if len(names) > MAX_EXPANSION:
            raise HostfileError(f"more than {MAX_EXPANSION} nodes", where=env.SLURM_JOB_NODELIST.name)
    wrong = next((name for name in names if not _NAME.fullmatch(name)), None)
    if not names or wrong is not None:
        what = f'"{wrong}" is not a node name' if names else "the list of nodes is empty"
        raise HostfileError(what, where=env.SLURM_JOB_NODELIST.name, hint='expected for example "node[01-04],gpu7"')
    if len(set(names)) != len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise HostfileError(f"{twice} is listed twice", where=env.SLURM_JOB_NODELIST.name)
    return tuple(names)


def parse_gpus(text: str, name: str) -> int:
    """Return the number of GPUs of `4`, `a100:4` or `a100:2,v100:1`; `name` is for errors. Raises: UsageError."""
    total = 0
    for part in text.split(","):
        number = part.rpartition(":")[2]
        if not _NUMBER.fullmatch(number):
            raise UsageError(f'"{text[:80]}" is not a number of GPUs', where=name, hint='expected "4" or "a100:4"')
        total += int(number)
    return total


def parse_job_detail(text: str) -> dict[str, int]:
    """Return the GPUs of each node from the output of `scontrol show job -d`; {} when it names none.

    Lines such as `Nodes=n[1-2] CPU_IDs=0-7 Mem=0 GRES=gpu:a100:4(IDX:0-3)`. Raises: HostfileError.
    """
    found: dict[str, int] = {}
    for nodes, gres in _JOB_DETAIL.findall(text):
        count = sum(map(int, _GRES_GPU.findall(re.sub(r"\([^)]*\)", "", gres))))
        for name in parse_nodelist(nodes):
            found[name] = found.get(name, 0) + count
    return found


def _gpus(environ: Mapping[str, str], nodes: tuple[str, ...], by_node: Mapping[str, int]) -> tuple[int, ...]:
    """Return the GPUs of each node, from the most exact source there is."""
    if all(name in by_node for name in nodes):
        counts = tuple(by_node[name] for name in nodes)
        if max(counts) <= MAX_EXPANSION:
            return counts
    for variable in (env.SLURM_GPUS_PER_NODE, env.SLURM_GPUS_ON_NODE):
        text = environ.get(variable.name)
        if not text:
            continue
        count = parse_gpus(text, variable.name)
        if count > MAX_EXPANSION:
            raise UsageError(f"{count} GPUs on a node", where=variable.name)
        total = environ.get(env.SLURM_GPUS.name)
        if total and parse_gpus(total, env.SLURM_GPUS.name) != count * len(nodes):
            raise UsageError(
                f"the job has {total} GPUs on {len(nodes)} nodes, {count} of them on this one; how many the others"
                " have is not known here",
                where=variable.name,
                hint="ask for --gpus-per-node, or make `scontrol` available where `launch` runs",
            )
        return (count,) * len(nodes)
    indices = environ.get(env.SLURM_JOB_GPUS.name)
    count = len([part for part in indices.split(",") if part]) if indices else 0
    return (count,) * len(nodes)


def _tasks(environ: Mapping[str, str], num_nodes: int) -> tuple[int, ...]:
    """Return the tasks of each node, 1 where nothing is said. In a shell inside a step it is said of the step alone."""
    name = env.SLURM_TASKS_PER_NODE.name
    text = environ.get(name) if env.SLURM_STEP_ID.name not in environ else None
    counts = parse_counts(text, name) if text else (1,) * num_nodes
    if len(counts) != num_nodes or max(counts) > MAX_EXPANSION:
        raise UsageError(f'"{text}" does not fit {num_nodes} nodes', where=name, hint=f"give {named('num_gpus')} N")
    return counts
