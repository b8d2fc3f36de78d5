"""One run as it is asked for: what a user says, checked for contradictions, before any host or file is looked at."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import UsageError
from launcher.cluster.cluster import NodeRange
from launcher.plan.plan import Command, Settings

DEFAULT_LOG_DIR = Path("runs")
_RUN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, kw_only=True)
class Request(Settings):
    """Which hosts, which ranks and what they run; `planning` makes a plan of it. Options have the fields' names."""

    command: Command
    hostfile: str | None = None
    in_slurm: bool = False  # the hosts are those of the Slurm allocation this process runs in
    include: str = ""
    exclude: str = ""
    num_nodes: NodeRange | None = None  # of the hosts, the first so many
    min_nodes: int | None = None  # continue without lost hosts while there are as many
    num_gpus: int | str | None = None  # ranks on each host: a number, "gpu", "cpu" or "auto"; None: all slots
    master_addr: str | None = None
    master_port: int | None = None
    standalone: bool = False  # this machine alone
    node_rank: int | None = None  # start this node's ranks only
    no_ssh: bool = False  # the same, with the node's number from its name
    force_multi: bool = False  # this machine's name is reached over SSH, too
    env: tuple[str, ...] = ()
    env_files: tuple[Path, ...] = ()
    log_dir: Path = DEFAULT_LOG_DIR
    notes: tuple[str, ...] = ()  # what the user should know about what was asked for

    def __post_init__(self) -> None:
        if self.run_id is not None and not _RUN_ID.fullmatch(self.run_id):
            raise UsageError(
                f'"{self.run_id}" cannot be a job id', where="--job-id", hint="use letters, digits and . _ : - only"
            )
        if self.min_nodes is not None and not self.max_restarts:
            raise UsageError("--min-nodes goes with --max-restarts", hint="add --max-restarts N")
        if self.standalone and (self.hostfile is not None or self.runs_one_node):
            raise UsageError("--standalone is for this machine alone", hint="leave it or the other hosts out")
        nodes = self.num_nodes or NodeRange(1, 1)
        if self.runs_one_node and nodes.is_elastic:
            raise UsageError(
                f"--num-nodes {nodes} needs one `launch` that starts all nodes",
                hint="name the hosts with --hostfile, or give one number of nodes with --node-rank",
            )
        if self.hostfile is None and not self.in_slurm:
            for name, value in (("--include", self.include), ("--exclude", self.exclude)):
                if value and self.num_gpus is not None:
                    raise UsageError(f"{name} and --num-gpus exclude each other", hint="give one of them")
            if nodes.least > 1 and not self.runs_one_node:
                raise UsageError(
                    f"--num-nodes {nodes} needs a --hostfile",
                    hint="name one with --hostfile, or run this on every node with --node-rank",
                )

    @property
    def runs_one_node(self) -> bool:
        """Whether every node runs a command of its own, and this one starts the ranks of one node."""
        return self.no_ssh or self.node_rank is not None

    @property
    def has_hosts(self) -> bool:
        """Whether a hostfile or Slurm says which hosts there are and which slots they have."""
        return self.hostfile is not None or self.in_slurm

    @property
    def is_here_only(self) -> bool:
        """Whether the one host is this machine, so that its agent may start before the run is planned."""
        return self.runs_one_node or not (self.has_hosts or self.force_multi)

    @property
    def least_nodes(self) -> int | None:
        """With how many hosts a restart may continue; None: all are needed."""
        if self.min_nodes is None and self.num_nodes is not None and self.num_nodes.is_elastic:
            return self.num_nodes.least
        return self.min_nodes
