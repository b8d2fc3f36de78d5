"""The options of `launch run`, in DeepSpeed's spelling and in kebab-case, and what they mean together."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from launcher.base.errors import UsageError
from launcher.base.suggest import did_you_mean
from launcher.cli.completion import files
from launcher.cli.host_options import HOST_CHOICE, REACHING, Reaching, both, note_debugging
from launcher.cli.numbers import Seconds
from launcher.cluster.allocation import in_allocation
from launcher.cluster.limits import MAX_SLOTS
from launcher.job.plan import DEFAULT_GRACE_S, DEFAULT_LEASE_S

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_F = TypeVar("_F", bound=Callable[..., Any])


_OPTIONS = (
    click.option(
        *both("standalone"), "standalone", is_flag=True, help="This machine only; the default without --hostfile."
    ),
    *HOST_CHOICE,
    click.option(
        *both("num_gpus", "--num_accelerators", "--nproc_per_node", "--nproc-per-node"),
        "num_gpus",
        type=click.IntRange(1, MAX_SLOTS),
        help="Ranks on each host. Default: all slots; without GPUs 1.",
    ),
    click.option(*both("master_addr"), "master_addr", help="Address of node 0. Default: the one the hostfile names."),
    click.option(
        *both("master_port"),
        "master_port",
        type=click.IntRange(1, 65535),
        help="Default: a free port on node 0.",
    ),
    click.option("-m", *both("module"), "module", is_flag=True, help="SCRIPT is a module, as in python -m."),
    click.option(*both("no_python"), "no_python", is_flag=True, help="SCRIPT is a program, run as it is."),
    click.option(
        *both("pass_local_rank"),
        "pass_local_rank",
        is_flag=True,
        help="Pass --local_rank=N to the script. Default: LOCAL_RANK in the environment only.",
    ),
    click.option(*both("no_local_rank"), "no_local_rank", is_flag=True, help="The default; for old scripts."),
    *REACHING,
    click.option(
        *both("no_ssh"),
        "no_ssh",
        is_flag=True,
        help="Start one node's ranks, here; each node runs its own command. See --node_rank.",
    ),
    click.option(*both("node_rank"), "node_rank", type=click.IntRange(0), help="Which node this is; implies --no_ssh."),
    click.option(
        *both("log_dir", "--enable_each_rank_log"),
        "log_dir",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="LAUNCH_LOG_DIR",
        default=Path("runs"),
        help="Where run folders go. Default: runs.",
    ),
    click.option(
        "--grace",
        *both("shutdown_timeout"),
        "grace_s",
        type=Seconds(0),
        default=DEFAULT_GRACE_S,
        metavar="SECONDS",
        help=f"Between SIGTERM and SIGKILL. Default: {DEFAULT_GRACE_S:g}.",
    ),
    click.option(
        "--lease",
        "lease_s",
        type=Seconds(2),
        default=DEFAULT_LEASE_S,
        metavar="SECONDS",
        help=f"Over a network: after a silence of this length the other side is gone. Default: {DEFAULT_LEASE_S:g}.",
    ),
    click.option(
        *both("max_restarts"),
        "max_restarts",
        type=click.IntRange(0),
        default=0,
        help="Start the job again after a failure, up to N times. Default: 0.",
    ),
    click.option(
        *both("min_nodes"),
        "min_nodes",
        type=click.IntRange(1),
        help="At a restart go on without lost hosts, with at least N. Default: all are needed.",
    ),
    click.option(
        *both("hang_timeout"),
        "hang_timeout_s",
        type=Seconds(0, min_open=True),
        metavar="SECONDS",
        help="End the job when a rank makes no progress for so long. Default: never.",
    ),
    click.option(
        *both("env"),
        "env",
        multiple=True,
        metavar="KEY[=VALUE]",
        help="Set a variable for every rank, or pass this shell's own value on. Repeatable.",
    ),
    click.option(
        *both("env_file"),
        "env_files",
        multiple=True,
        type=click.Path(path_type=Path),
        help="File of KEY=VALUE lines for every rank. Repeatable. .deepspeed_env and .launch_env are always read.",
    ),
    click.option(*both("bind_cores_to_rank"), "bind_cores", is_flag=True, help="Give each rank CPU cores of its own."),
    click.option(
        *both("bind_core_list"),
        "bind_core_list",
        metavar="LIST",
        help="The cores to share out, such as 0-15,32. Default: all physical cores. Implies --bind_cores_to_rank.",
    ),
    click.option(
        *both("save_pid"), "save_pid", is_flag=True, help="Write the launcher's pid to launch.pid of the run."
    ),
    click.option(
        *both("signals_to_handle"),
        "signals_to_handle",
        default="SIGINT,SIGTERM,SIGHUP",
        metavar="LIST",
        help="Signals that end the job in order. Default: SIGINT,SIGTERM,SIGHUP.",
    ),
    click.option(
        *both("log_level"),
        "log_level",
        type=click.Choice(LOG_LEVELS),
        default="info",
        callback=note_debugging,
        help="How much of our own to show; debug: the plan, and what --verbose shows. Default: info.",
    ),
    click.option("-q", "--quiet", is_flag=True, help="Show the ranks' output and errors only: --log_level error."),
    click.option("--plain", is_flag=True, help="Plain lines on a terminal too, without the panel below them."),
    click.option("--dry-run", is_flag=True, help="Print what would happen and stop."),
    click.option("--json", "as_json", is_flag=True, help="With --dry-run: print it as JSON."),
)


@dataclass(frozen=True, kw_only=True)
class RunOptions(Reaching):
    """The options of one `launch run`, by name."""

    script: str
    script_args: tuple[str, ...]
    standalone: bool
    num_gpus: int | None
    master_addr: str | None
    master_port: int | None
    module: bool
    no_python: bool
    pass_local_rank: bool
    no_local_rank: bool
    no_ssh: bool
    node_rank: int | None
    log_dir: Path
    grace_s: float
    lease_s: float
    max_restarts: int
    min_nodes: int | None
    hang_timeout_s: float | None
    env: tuple[str, ...]
    env_files: tuple[Path, ...]
    bind_cores: bool
    bind_core_list: str | None
    save_pid: bool
    signals_to_handle: str
    log_level: str
    quiet: bool
    plain: bool
    dry_run: bool
    as_json: bool

    def __post_init__(self) -> None:
        if self.module and self.no_python:
            raise UsageError("--module and --no_python exclude each other", hint="give one of them")
        if self.pass_local_rank and self.no_local_rank:
            raise UsageError("--pass_local_rank and --no_local_rank exclude each other", hint="give one of them")
        if self.min_nodes is not None and not self.max_restarts:
            raise UsageError("--min_nodes goes with --max_restarts", hint="add --max_restarts N")
        if self.as_json and not self.dry_run:
            raise UsageError("--json goes with --dry-run", hint="add --dry-run")
        if self.standalone and (self.hostfile is not None or self.is_by_hand):
            raise UsageError("--standalone is for this machine alone", hint="leave it or the other hosts out")
        if self.hostfile is None and not self.in_slurm:
            for name, value in (("--include", self.include), ("--exclude", self.exclude)):
                if value and self.num_gpus is not None:
                    raise UsageError(f"{name} and --num_gpus exclude each other", hint="give one of them")
            if self.num_nodes not in (None, 1) and not self.is_by_hand:
                raise UsageError(
                    f"--num_nodes {self.num_nodes} needs a --hostfile",
                    hint="name one with --hostfile, or run this on every node with --node_rank",
                )

    @property
    def in_slurm(self) -> bool:
        """Say whether the hosts are those of the Slurm allocation this command runs in."""
        is_chosen = self.hostfile is not None or self.standalone or self.is_by_hand
        return not is_chosen and in_allocation(os.environ)

    @property
    def is_by_hand(self) -> bool:
        """Say whether every node runs a command of its own."""
        return self.no_ssh or self.node_rank is not None

    @property
    def is_here_only(self) -> bool:
        """Say whether the one host is this machine, so that its agent may start before the run is planned."""
        is_one_host = self.is_by_hand or (self.hostfile is None and not self.force_multi)
        return is_one_host and not self.in_slurm

    @property
    def wants_panel(self) -> bool:
        """Say whether a terminal may show the panel: part of what `info` shows."""
        return not (self.plain or self.quiet or self.shows_debug) and self.log_level == "info"

    @property
    def shows_debug(self) -> bool:
        """Say whether to show what SSH does."""
        return self.verbose or self.log_level == "debug"

    @property
    def stop_signals(self) -> tuple[int, ...]:
        """Numbers of the signals that end the job. Raises: UsageError."""
        numbers = []
        for name in filter(None, (part.strip().upper() for part in self.signals_to_handle.split(","))):
            full = name if name.startswith("SIG") else f"SIG{name}"
            if full not in signal.Signals.__members__ or full in ("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGURG"):
                hint = did_you_mean(full, signal.Signals.__members__)
                raise UsageError(f"{name} is no signal that can be handled", where="--signals_to_handle", hint=hint)
            numbers.append(int(signal.Signals[full]))
        return tuple(numbers)

    @property
    def kind(self) -> str:
        """What SCRIPT is: "script", "module" or "program"."""
        return "module" if self.module else "program" if self.no_python else "script"


def run_options(function: _F) -> _F:
    """Add all options and the arguments SCRIPT and ARGS to a click command."""
    decorated: Any = click.argument(
        "script_args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...", shell_complete=files
    )(function)
    decorated = click.argument("script", shell_complete=files)(decorated)
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    result: _F = decorated
    return result
