"""One run as it is asked for: what a user says, checked for contradictions, before any host or file is looked at."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import UsageError
from launcher.base.fields import MAX_PORT, Address, Limit, Seconds, Url, Whole, named
from launcher.base.resume import AUTO, NEVER
from launcher.cluster.cluster import MAX_EXPANSION, MAX_SLOTS, NodeRange
from launcher.journal.faults import parse_fault
from launcher.plan.plan import LADDER, Command, Settings

DEFAULT_LOG_DIR = Path("runs")
# What the fields of a request hold, whoever fills them: options, a job file, `launcher.run`.
LIMITS: dict[str, Limit] = {
    "num_gpus": Whole(1, MAX_SLOTS, ("gpu", "cpu", "auto")),
    "min_nodes": Whole(1, MAX_EXPANSION),
    "node_rank": Whole(),
    "master_port": Whole(1, MAX_PORT),
    "ssh_port": Whole(1, MAX_PORT),
    "max_restarts": Whole(),
    "grace_s": Seconds(0),
    "lease_s": Seconds(2),
    "hang_timeout_s": Seconds(0, is_open=True),
    "metrics_port": Address(),
    "otlp": Url(("auto",)),
}
_SIGNALS = frozenset(map(int, signal.Signals))
_RUN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_RESERVED_SIGNALS = {
    **dict.fromkeys(("SIGKILL", "SIGSTOP"), "no program can handle it"),
    "SIGCHLD": "it tells launch that a process of its own has ended",
    "SIGURG": "it asks ranks for their stacks",
    "SIGQUIT": "it asks for the stacks of all ranks, as `launch stacks` does",
    "SIGTSTP": "it suspends launch, and the ranks run on",
    "SIGCONT": "it ends a suspension",
    **dict.fromkeys(("SIGTTIN", "SIGTTOU"), "it stops who uses a terminal from the background"),
    "SIGPIPE": "it tells that the reader of what launch writes has ended",
    "SIGWINCH": "it tells that the size of the terminal has changed",
    **dict.fromkeys(
        ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGIOT", "SIGTRAP", "SIGSYS"),
        "it tells that launch itself has failed",
    ),
}


def check_fields(settings: object) -> None:
    """Check each field of a dataclass by itself. Raises: UsageError."""
    for field in dataclasses.fields(settings):  # type: ignore[arg-type]  # of any dataclass
        limit, value = LIMITS.get(field.name), getattr(settings, field.name)
        if value is field.default:
            continue
        if limit is not None and not limit.allows(value):
            raise UsageError(f"expected {limit}, got {value!r:.80}", where=named(field.name))
        is_tuple = isinstance(value, tuple) and all(isinstance(each, int) for each in value)
        if str(field.type).startswith("tuple[int") and not is_tuple:
            raise UsageError(f"expected whole numbers such as (0, 1), got {value!r:.80}", where=named(field.name))
        if field.name == "stop_signals":
            check_signals(value)


def node_range(text: str) -> NodeRange:
    """Return how many nodes a text means: N, or torchrun's MIN:MAX. Raises: UsageError."""
    least, colon, most = text.partition(":")
    with contextlib.suppress(ValueError):
        found = NodeRange(int(least), int(most if colon else least))
        if 1 <= found.least <= found.most <= MAX_EXPANSION:
            return found
    expected = "MIN:MAX" if colon else f"a whole number from 1 to {MAX_EXPANSION}"
    raise UsageError(f"expected {expected}, got {text!r:.80}", where=named("num_nodes"))


def resume_from(text: str) -> str:
    """Return `auto`, `never`, or the whole path of a folder: ranks may start in another one. Raises: UsageError."""
    if not text:
        raise UsageError("names no folder", where=named("resume"), hint="give auto, never or a folder")
    return text if text in (AUTO, NEVER) or "://" in text else os.path.abspath(text)


def check_signals(numbers: Collection[int]) -> None:
    """Raise UsageError for a signal that cannot stop a job."""
    for number in numbers:
        name = signal.Signals(number).name if number in _SIGNALS else str(number)
        if name in _RESERVED_SIGNALS or number not in _SIGNALS:
            why = _RESERVED_SIGNALS.get(name, "there is none of that number")
            raise UsageError(
                f"{name} cannot stop a job: {why}",
                where=named("stop_signals"),
                hint="name others, such as SIGINT,SIGTERM,SIGHUP",
            )


def _check_faults(settings: Settings) -> None:
    """Raise UsageError for a fault of a wrong form, and where nothing would count the steps."""
    for text in settings.faults:
        try:
            parse_fault(text)
        except ValueError as error:
            raise UsageError(str(error), where=named("faults"), hint="give KIND@STEP or KIND@STEP:RANK") from None
    if settings.faults and not settings.has_journal:
        raise UsageError(f"{named('faults')} needs the journal, which counts the steps", hint="leave --no-journal out")


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
        check_fields(self)
        if self.run_id is not None and not _RUN_ID.fullmatch(self.run_id):
            raise UsageError(
                f'"{self.run_id}" cannot be a job id',
                where=named("run_id"),
                hint="use letters, digits and . _ : - only",
            )
        _check_faults(self)
        if self.min_nodes is not None and not self.max_restarts:
            needed = named("max_restarts")
            raise UsageError(f"{named('min_nodes')} goes with {needed}", hint=f"add {needed} N")
        if self.standalone and (self.hostfile is not None or self.runs_one_node):
            raise UsageError(f"{named('standalone')} is for this machine alone", hint="leave it or the other hosts out")
        if self.num_gpus == "cpu" and self.has_hosts:
            raise UsageError(
                f"{named('num_gpus')} cpu counts the cores of this machine, and each host has its own",
                hint=f"give {named('num_gpus')} N, or leave it out: the hosts have slots",
            )
        nodes, option = self.num_nodes or NodeRange(1, 1), named("num_nodes")
        hostfile, node_rank = named("hostfile"), named("node_rank")
        if self.on_oom == LADDER and self.runs_one_node and (self.hostfile is not None or nodes.most > 1):
            raise UsageError(
                f"{named('on_oom')} {LADDER} needs one `launch` that starts all nodes: each would change its own ranks",
                hint=f"name the hosts with {named('hostfile')}, or leave it out and change the config",
            )
        if self.runs_one_node and nodes.is_elastic:
            raise UsageError(
                f"{option} {nodes} needs one `launch` that starts all nodes",
                hint=f"name the hosts with {hostfile}, or give one number of nodes with {node_rank}",
            )
        if self.hostfile is None and not self.in_slurm:
            filters = [named(name) for name in ("include", "exclude") if getattr(self, name)]
            if filters and self.num_gpus is not None:
                raise UsageError(f"{filters[0]} and {named('num_gpus')} exclude each other", hint="give one of them")
            if nodes.least > 1 and not self.runs_one_node:
                raise UsageError(
                    f"{option} {nodes} needs a {hostfile}",
                    hint=f"name one with {hostfile}, or run this on every node with {node_rank}",
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
