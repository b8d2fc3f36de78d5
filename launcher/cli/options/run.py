"""The options of `launch run`, in DeepSpeed's spelling and in kebab-case, and what they mean together."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from launcher.base import env
from launcher.base.errors import UsageError
from launcher.base.resume import AUTO, NEVER
from launcher.base.suggest import did_you_mean
from launcher.cli.commands.completion import files
from launcher.cli.options.command import option
from launcher.cli.options.hosts import HOST_CHOICE, HOSTS, REACHING, Reaching, note_debugging
from launcher.cli.options.types import Ranks, Seconds, Whole
from launcher.cluster.limits import MAX_SLOTS
from launcher.compat import AUTO as AUTO_ENGINE
from launcher.compat import ENGINES
from launcher.job.plan import DEFAULT_GRACE_S, DEFAULT_LEASE_S
from launcher.slurm.allocation import in_allocation

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_F = TypeVar("_F", bound=Callable[..., Any])


_RANKS, _ENVIRONMENT, _FAILURE, _OUTPUT = "Ranks", "Environment", "Failure", "Output"
_COMPATIBILITY = "Compatibility"
_SSH = "pdsh"  # DeepSpeed's name for its way over SSH

_OPTIONS = (
    *HOST_CHOICE,
    *REACHING,
    option(
        "--node-rank",
        heading=HOSTS,
        type=Whole(0),
        help="Start this node's ranks only; every node runs a command of its own.",
    ),
    option(
        "--job-id",
        "run_id",
        heading=HOSTS,
        metavar="NAME",
        help="With --node-rank or --no-ssh, the same name on all nodes. Default: from the master's address.",
    ),
    option(
        "--no-ssh",
        heading=HOSTS,
        is_flag=True,
        help="The same, with the number of the node from its name in the hostfile.",
    ),
    option(
        "--num-gpus",
        heading=_RANKS,
        also=("--num-accelerators", "--nproc-per-node"),
        type=Ranks(1, MAX_SLOTS),
        help="Ranks on each host: a number, or gpu, cpu, auto. Default: all slots; without GPUs 1.",
    ),
    option("--master-addr", heading=_RANKS, help="Address of node 0. Default: the one the hostfile names."),
    option("--master-port", heading=_RANKS, type=Whole(1, 65535), help="Default: a free port on node 0."),
    option("-m", "--module", heading=_RANKS, is_flag=True, help="SCRIPT is a module, as in python -m."),
    option("--no-python", heading=_RANKS, is_flag=True, help="SCRIPT is a program, run as it is."),
    option(
        "--pass-local-rank",
        heading=_RANKS,
        is_flag=True,
        help="Pass --local_rank=N to the script. Default: LOCAL_RANK in the environment only.",
    ),
    option(
        "--bind-cores-to-rank", "bind_cores", heading=_RANKS, is_flag=True, help="Give each rank CPU cores of its own."
    ),
    option(
        "--bind-core-list",
        heading=_RANKS,
        metavar="LIST",
        help="CPU cores to bind, such as 0-15,32. Default: all physical cores. Implies --bind-cores-to-rank.",
    ),
    option(
        "--env",
        heading=_ENVIRONMENT,
        multiple=True,
        metavar="KEY[=VALUE]",
        help="Set a variable for every rank, or pass this shell's own value on. Repeatable.",
    ),
    option(
        "--env-file",
        "env_files",
        heading=_ENVIRONMENT,
        multiple=True,
        type=click.Path(path_type=Path),
        help="File of KEY=VALUE lines for every rank. Repeatable. .deepspeed_env and .launch_env are always read.",
    ),
    option(
        "--grace",
        "grace_s",
        heading=_FAILURE,
        also=("--shutdown-timeout",),
        type=Seconds(0),
        default=DEFAULT_GRACE_S,
        help=f"Between SIGTERM and SIGKILL. Default: {DEFAULT_GRACE_S:g}.",
    ),
    option(
        "--lease",
        "lease_s",
        heading=_FAILURE,
        type=Seconds(2),
        default=DEFAULT_LEASE_S,
        help=f"Over a network: after a silence of this length the other side is gone. Default: {DEFAULT_LEASE_S:g}.",
    ),
    option(
        "--max-restarts",
        heading=_FAILURE,
        type=Whole(0),
        default=0,
        help="Start the job again after a failure, up to N times. Default: 0.",
    ),
    option(
        "--min-nodes",
        heading=_FAILURE,
        type=Whole(1),
        help="At a restart continue without lost hosts, with at least N. Default: all are needed.",
    ),
    option(
        "--resume",
        heading=_FAILURE,
        metavar="auto|never|DIR",
        help="Continue from the newest checkpoint of checkpoint.folder, or of DIR. Default: at restarts only.",
    ),
    option(
        "--hang-timeout",
        "hang_timeout_s",
        heading=_FAILURE,
        type=Seconds(0, min_open=True),
        help="End the job when a rank makes no progress for so long. Default: never.",
    ),
    option(
        "--signals-to-handle",
        heading=_FAILURE,
        default="SIGINT,SIGTERM,SIGHUP",
        metavar="LIST",
        help="Signals that end the job in order. Default: SIGINT,SIGTERM,SIGHUP.",
    ),
    option(
        "--log-dir",
        heading=_OUTPUT,
        also=("--enable-each-rank-log",),
        type=click.Path(file_okay=False, path_type=Path),
        envvar="LAUNCH_LOG_DIR",
        default=Path("runs"),
        help="Where run folders go. Default: runs.",
    ),
    option(
        "--no-prefix",
        heading=_OUTPUT,
        is_flag=True,
        help="Show the ranks' lines as they are, without [rank] before them.",
    ),
    option(
        "--log-level",
        heading=_OUTPUT,
        type=click.Choice(LOG_LEVELS),
        default="info",
        callback=note_debugging,
        help="How much of our own to show; debug: the plan, and what --verbose shows. Default: info.",
    ),
    option(
        "-q",
        "--quiet",
        heading=_OUTPUT,
        is_flag=True,
        help="Of our own show warnings and errors only: --log-level warning.",
    ),
    option(
        "--plain", heading=_OUTPUT, is_flag=True, help="Plain lines on a terminal too, without the panel below them."
    ),
    option("--dry-run", heading=_OUTPUT, is_flag=True, help="Print what would happen and stop."),
    option("--json", "as_json", heading=_OUTPUT, is_flag=True, help="With --dry-run: print it as JSON."),
    option(
        "--engine",
        heading=_COMPATIBILITY,
        type=click.Choice(ENGINES),
        envvar=env.ENGINE.name,
        default=AUTO_ENGINE,
        help="What import deepspeed finds: auto: DeepSpeed where it is installed, else the built-in engine; builtin:"
        " always that. Default: auto.",
    ),
    option(
        "--standalone",
        heading=_COMPATIBILITY,
        is_flag=True,
        help="This machine only, inside a Slurm job too; else the default without --hostfile.",
    ),
    option("--no-local-rank", heading=_COMPATIBILITY, is_flag=True, help="The default; for old scripts."),
    option(
        "--launcher",
        heading=_COMPATIBILITY,
        metavar=_SSH,
        help="SSH, the default with a hostfile; for old scripts and accelerate.",
    ),
    option(
        "--save-pid", heading=_COMPATIBILITY, is_flag=True, help="Write the launcher's pid to launch.pid of the run."
    ),
)

_RESERVED_SIGNALS = {
    "SIGKILL": "no program can handle it",
    "SIGSTOP": "no program can handle it",
    "SIGCHLD": "it tells launch that a process of its own has ended",
    "SIGURG": "it asks ranks for their stacks",
    "SIGQUIT": "it asks for the stacks of all ranks, as `launch stacks` does",
}
_RUN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, kw_only=True)
class RunOptions(Reaching):
    """The options of one `launch run`, by name."""

    script: str
    script_args: tuple[str, ...]
    standalone: bool
    engine: str
    num_gpus: int | None
    master_addr: str | None
    master_port: int | None
    module: bool
    no_python: bool
    pass_local_rank: bool
    no_local_rank: bool
    launcher: str | None
    no_ssh: bool
    node_rank: int | None
    run_id: str | None
    log_dir: Path
    grace_s: float
    lease_s: float
    max_restarts: int
    min_nodes: int | None
    resume: str | None
    hang_timeout_s: float | None
    env: tuple[str, ...]
    env_files: tuple[Path, ...]
    bind_cores: bool
    bind_core_list: str | None
    save_pid: bool
    signals_to_handle: str
    no_prefix: bool
    log_level: str
    quiet: bool
    plain: bool
    dry_run: bool
    as_json: bool

    def __post_init__(self) -> None:
        if self.run_id is not None and not _RUN_ID.fullmatch(self.run_id):
            raise UsageError(
                f'"{self.run_id}" cannot be a job id', where="--job-id", hint="use letters, digits and . _ : - only"
            )
        if self.module and self.no_python:
            raise UsageError("--module and --no-python exclude each other", hint="give one of them")
        if self.pass_local_rank and self.no_local_rank:
            raise UsageError("--pass-local-rank and --no-local-rank exclude each other", hint="give one of them")
        if self.launcher not in (None, _SSH) or (self.launcher is not None and self.in_slurm):
            raise UsageError(
                f"--launcher {self.launcher}: hosts of a hostfile are reached over SSH, those of a Slurm job by srun",
                hint=f"leave it out; --launcher {_SSH} with a --hostfile means SSH",
            )
        if self.min_nodes is not None and not self.max_restarts:
            raise UsageError("--min-nodes goes with --max-restarts", hint="add --max-restarts N")
        if self.resume == "":
            raise UsageError("--resume names no folder", hint="write --resume auto, --resume never or --resume DIR")
        if self.as_json and not self.dry_run:
            raise UsageError("--json goes with --dry-run", hint="add --dry-run")
        if self.standalone and (self.hostfile is not None or self.is_by_hand):
            raise UsageError("--standalone is for this machine alone", hint="leave it or the other hosts out")
        if self.hostfile is None and not self.in_slurm:
            for name, value in (("--include", self.include), ("--exclude", self.exclude)):
                if value and self.num_gpus is not None:
                    raise UsageError(f"{name} and --num-gpus exclude each other", hint="give one of them")
            if self.num_nodes not in (None, 1) and not self.is_by_hand:
                raise UsageError(
                    f"--num-nodes {self.num_nodes} needs a --hostfile",
                    hint="name one with --hostfile, or run this on every node with --node-rank",
                )

    @property
    def in_slurm(self) -> bool:
        """Whether the hosts are those of the Slurm allocation this command runs in."""
        is_chosen = self.hostfile is not None or self.standalone or self.is_by_hand
        return not is_chosen and in_allocation(os.environ)

    @property
    def resumes_from(self) -> str:
        """What `--resume` says, a folder with its whole path; "" where it was not given."""
        if self.resume is None or self.resume in (AUTO, NEVER) or "://" in self.resume:
            return self.resume or ""
        return os.path.abspath(self.resume)

    @property
    def is_by_hand(self) -> bool:
        """Whether every node runs a command of its own."""
        return self.no_ssh or self.node_rank is not None

    @property
    def is_here_only(self) -> bool:
        """Whether the one host is this machine, so that its agent may start before the run is planned."""
        is_one_host = self.is_by_hand or (self.hostfile is None and not self.force_multi)
        return is_one_host and not self.in_slurm

    @property
    def wants_panel(self) -> bool:
        """Whether a terminal may show the panel: part of what `info` shows."""
        return not (self.plain or self.quiet or self.shows_debug) and self.log_level == "info"

    @property
    def shows_debug(self) -> bool:
        """Whether to show what SSH does."""
        return self.verbose or self.log_level == "debug"

    @property
    def stop_signals(self) -> tuple[int, ...]:
        """Numbers of the signals that end the job. Raises: UsageError."""
        numbers = []
        for name in filter(None, (part.strip().upper() for part in self.signals_to_handle.split(","))):
            full = name if name.startswith("SIG") else f"SIG{name}"
            if full not in signal.Signals.__members__:
                hint = did_you_mean(full, signal.Signals.__members__)
                raise UsageError(f"there is no signal {name}", where="--signals-to-handle", hint=hint)
            if full in _RESERVED_SIGNALS:
                raise UsageError(
                    f"{full} cannot end a job in order: {_RESERVED_SIGNALS[full]}",
                    where="--signals-to-handle",
                    hint="name others, such as SIGINT,SIGTERM,SIGHUP",
                )
            numbers.append(int(signal.Signals[full]))
        return tuple(numbers)

    @property
    def kind(self) -> str:
        """What SCRIPT is: "script", "module" or "program"."""
        return "module" if self.module else "program" if self.no_python else "script"


def num_ranks(wish: int | str | None, *, has_hosts: bool) -> int | None:
    """Return what `--num-gpus` asks for, None for all slots. torchrun's words mean this machine.

    has_hosts: hosts come from a hostfile or from Slurm, which say themselves what slots they have.

    Raises: UsageError for `gpu` where there is none.
    """
    if not isinstance(wish, str):
        return wish
    if has_hosts and wish != "cpu":
        return None
    from launcher.cluster.devices import local_device_tokens

    num_gpus = len(local_device_tokens(os.environ))
    if wish == "gpu" and not num_gpus:
        raise UsageError("this machine has no GPU", where="--num-gpus gpu", hint="write --num-gpus N for N CPU ranks")
    return num_gpus if wish != "cpu" and num_gpus else os.cpu_count()


def run_options(function: _F) -> _F:
    """Add all options and the arguments SCRIPT and ARGS to a click command."""
    decorated: Any = click.argument(
        "script_args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...", shell_complete=files
    )(function)
    decorated = click.argument("script", shell_complete=files)(decorated)
    for declare in reversed(_OPTIONS):
        decorated = declare(decorated)
    result: _F = decorated
    return result
