"""The options of `launch run`, in DeepSpeed's spelling and in kebab-case, and what they mean together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from launcher.base.errors import UsageError
from launcher.cli.completion import files
from launcher.job.plan import DEFAULT_GRACE_S

_F = TypeVar("_F", bound=Callable[..., Any])


def _both(name: str, *more: str) -> tuple[str, ...]:
    """Return `--a_b`, `--a-b` and the further spellings of one option."""
    return tuple(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}", *more)))


_OPTIONS = (
    click.option("-H", *_both("hostfile"), "hostfile", type=click.Path(), help="File of `host slots=N` lines."),
    click.option(
        "-i",
        *_both("include"),
        default="",
        metavar="HOST[:SLOT,..]@..",
        help="Use these hosts and slots only.",
    ),
    click.option(
        "-e",
        *_both("exclude"),
        default="",
        metavar="HOST[:SLOT,..]@..",
        help="Leave these hosts or slots out.",
    ),
    click.option(*_both("num_nodes", "--nnodes"), "num_nodes", type=click.IntRange(1), help="Use the first N hosts."),
    click.option(
        *_both("num_gpus", "--num_accelerators", "--nproc_per_node", "--nproc-per-node"),
        "num_gpus",
        type=click.IntRange(1),
        help="Ranks on each host. Default: all slots; without GPUs 1.",
    ),
    click.option(*_both("master_addr"), "master_addr", help="Address of node 0. Default: the one the hostfile names."),
    click.option(
        *_both("master_port"),
        "master_port",
        type=click.IntRange(1, 65535),
        help="Default: a free port on node 0.",
    ),
    click.option("-m", *_both("module"), "module", is_flag=True, help="SCRIPT is a module, as in python -m."),
    click.option(*_both("no_python"), "no_python", is_flag=True, help="SCRIPT is a program, run as it is."),
    click.option(
        *_both("pass_local_rank"),
        "pass_local_rank",
        is_flag=True,
        help="Pass --local_rank=N to the script. Default: LOCAL_RANK in the environment only.",
    ),
    click.option(*_both("no_local_rank"), "no_local_rank", is_flag=True, help="The default; for old scripts."),
    click.option(*_both("ssh_port"), "ssh_port", type=click.IntRange(1, 65535), help="Default: ~/.ssh/config, 22."),
    click.option("-F", *_both("ssh_config"), "ssh_config", type=click.Path(), help="Instead of ~/.ssh/config."),
    click.option(*_both("remote_python"), "remote_python", help="Python on the other hosts. Default: this one's path."),
    click.option(*_both("force_multi"), "force_multi", is_flag=True, help="Use SSH for this machine's name too."),
    click.option(
        *_both("log_dir"),
        "log_dir",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="LAUNCH_LOG_DIR",
        default=Path("runs"),
        help="Where run folders go. Default: runs.",
    ),
    click.option(
        "--grace",
        "grace_s",
        type=click.FloatRange(0),
        default=DEFAULT_GRACE_S,
        metavar="SECONDS",
        help=f"Between SIGTERM and SIGKILL. Default: {DEFAULT_GRACE_S:g}.",
    ),
    click.option("-q", "--quiet", is_flag=True, help="Show the ranks' output and errors only."),
    click.option("--dry-run", is_flag=True, help="Print what would happen and stop."),
    click.option("--json", "as_json", is_flag=True, help="With --dry-run: print it as JSON."),
)


@dataclass(frozen=True)
class RunOptions:
    """The options of one `launch run`, by name."""

    script: str
    script_args: tuple[str, ...]
    hostfile: str | None
    include: str
    exclude: str
    num_nodes: int | None
    num_gpus: int | None
    master_addr: str | None
    master_port: int | None
    module: bool
    no_python: bool
    pass_local_rank: bool
    no_local_rank: bool
    ssh_port: int | None
    ssh_config: str | None
    remote_python: str | None
    force_multi: bool
    log_dir: Path
    grace_s: float
    quiet: bool
    dry_run: bool
    as_json: bool

    def __post_init__(self) -> None:
        if self.module and self.no_python:
            raise UsageError("--module and --no_python exclude each other", hint="give one of them")
        if self.pass_local_rank and self.no_local_rank:
            raise UsageError("--pass_local_rank and --no_local_rank exclude each other", hint="give one of them")
        if self.as_json and not self.dry_run:
            raise UsageError("--json goes with --dry-run", hint="add --dry-run")
        if self.hostfile is None:
            for name, value in (("--include", self.include), ("--exclude", self.exclude)):
                if value and self.num_gpus is not None:
                    raise UsageError(f"{name} and --num_gpus exclude each other", hint="give one of them")
            if self.num_nodes not in (None, 1):
                raise UsageError(f"--num_nodes {self.num_nodes} needs a --hostfile", hint="name one with --hostfile")

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
