"""The options that say which hosts a command works on and how they are reached: of `launch run` and of the tools."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from launcher.base import env
from launcher.cli.options.command import option
from launcher.cli.options.types import Nodes, Whole
from launcher.cluster.limits import MAX_EXPANSION
from launcher.transport.ssh import WAYS

if TYPE_CHECKING:
    from launcher.cluster.cluster import NodeRange
    from launcher.transport.ssh.config import SshOptions

HOSTS = "Hosts"
DEFAULT_HOSTFILE = "/job/hostfile"
DEFAULT_HOSTFILE_NOTE = f"hosts of {DEFAULT_HOSTFILE}, as DeepSpeed reads it when no --hostfile is given"
DEBUGGING = "launcher.debugging"  # key of click's `Context.meta`


def note_debugging(ctx: click.Context, _: click.Parameter, value: Any) -> Any:
    """Let `LaunchGroup` know that this run shows what it does inside: the callback of an option."""
    if value in (True, "debug"):
        ctx.meta[DEBUGGING] = True
    return value


# Which hosts.
HOST_CHOICE = (
    option(
        "-H",
        "--hostfile",
        heading=HOSTS,
        type=click.Path(),
        metavar="FILE",
        help="File of `host slots=N` lines. Default: the Slurm job, else /job/hostfile, else this machine.",
    ),
    option(
        "-i",
        "--include",
        heading=HOSTS,
        default="",
        metavar="HOSTS",
        help="Use these hosts and slots only: HOST[:SLOT,...][@...], such as node-a@node-b:0,2.",
    ),
    option(
        "-e",
        "--exclude",
        heading=HOSTS,
        default="",
        metavar="HOSTS",
        help="Use all hosts and slots but these.",
    ),
    option(
        "--num-nodes",
        heading=HOSTS,
        also=("--nnodes", "--nnode", "--num-machines"),
        type=Nodes(1, MAX_EXPANSION),
        help="Use the first N hosts; MIN:MAX: as many as there are, and restart with at least MIN.",
    ),
)
# How they are reached.
REACHING = (
    option(
        "--ssh",
        heading=HOSTS,
        type=click.Choice(WAYS),
        default="auto",
        help="A library, or the system's ssh. Default: as the SSH config needs.",
    ),
    option("--ssh-port", heading=HOSTS, type=Whole(1, 65535), help="SSH port. Default: ~/.ssh/config, 22."),
    option(
        "-F",
        "--ssh-config",
        heading=HOSTS,
        type=click.Path(),
        metavar="FILE",
        help="SSH config. Default: ~/.ssh/config.",
    ),
    option(
        "--remote-python",
        heading=HOSTS,
        metavar="PATH",
        help="Python on the hosts. Default: as here.",
    ),
    option("--force-multi", heading=HOSTS, is_flag=True, help="Reach this machine over SSH as well."),
    option(
        "--accept-new-host-keys",
        heading=HOSTS,
        is_flag=True,
        help="Record the SSH host keys of unknown hosts instead of refusing them.",
    ),
    option("--setup", heading=HOSTS, default="", metavar="CMD", help="Shell command to run on each host first."),
    option("--venv-script", heading=HOSTS, metavar="FILE", help="Shell script to source on each host first."),
    option(
        "-v",
        "--verbose",
        also=("--debug",),
        heading="Output",
        is_flag=True,
        callback=note_debugging,
        help="Show SSH, the agent protocol, and tracebacks of errors of launch, on stderr.",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Reaching:
    """The values of these options, by name."""

    hostfile: str | None = None
    include: str = ""
    exclude: str = ""
    num_nodes: NodeRange | None = None
    ssh: str = "auto"
    ssh_port: int | None = None
    ssh_config: str | None = None
    remote_python: str | None = None
    force_multi: bool = False
    accept_new_host_keys: bool = False
    setup: str = ""
    venv_script: str | None = None
    verbose: bool = False

    @property
    def shell_setup(self) -> str:
        """Shell text that runs on a host before anything of ours."""
        import shlex

        source = [f". {shlex.quote(self.venv_script)}"] if self.venv_script else []
        return " && ".join([*source, *([self.setup] if self.setup else [])])

    @property
    def ssh_options(self) -> SshOptions:
        """How hosts are reached over SSH."""
        from pathlib import Path

        from launcher.transport.ssh.config import SshOptions

        return SshOptions(
            way=self.ssh,
            port=self.ssh_port,
            config_file=Path(self.ssh_config) if self.ssh_config else None,
            python=self.remote_python,
            setup=self.shell_setup,
            accept_new_host_keys=self.accept_new_host_keys,
            verbose=self.verbose,
        )


def default_hostfile() -> str | None:
    """Return the hostfile that DeepSpeed reads when none is named, None where there is no such file.

    A rank that starts `launch` itself runs on the machine it is on.
    """
    is_there = env.JOB_ID.name not in os.environ and os.path.isfile(DEFAULT_HOSTFILE)
    return DEFAULT_HOSTFILE if is_there else None
