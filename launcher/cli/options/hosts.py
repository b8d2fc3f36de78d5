"""The options that say which hosts a command works on and how they are reached: of `launch run` and of the tools."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from launcher.base import env
from launcher.base.fields import filled
from launcher.cli.options.command import Number, under
from launcher.plan.request import LIMITS, node_range
from launcher.transport.ssh.options import WAYS, SshOptions

DEFAULT_HOSTFILE = "/job/hostfile"
DEFAULT_HOSTFILE_NOTE = f"hosts of {DEFAULT_HOSTFILE}, as DeepSpeed reads it when no --hostfile is given"
DEBUGGING = "launcher.debugging"  # key of click's `Context.meta`


def note_debugging(ctx: click.Context, _: click.Parameter, value: Any) -> Any:
    """Let `LaunchGroup` know that this run shows what it does inside: the callback of an option."""
    if value in (True, "debug"):
        ctx.meta[DEBUGGING] = True
    return value


_hosts, _ssh = under("Hosts"), under("SSH")

# Which hosts.
HOST_CHOICE = (
    _hosts(
        "-H",
        "--hostfile",
        type=click.Path(),
        metavar="FILE",
        help="File of `host slots=N` lines. Default: the Slurm job, else /job/hostfile, else this machine.",
    ),
    _hosts(
        "-i",
        "--include",
        default="",
        metavar="HOSTS",
        help="Use these hosts and slots only: HOST[:SLOT,...][@...], such as node-a@node-b:0,2.",
    ),
    _hosts("-e", "--exclude", default="", metavar="HOSTS", help="Use all hosts and slots but these."),
    _hosts(
        "--num-nodes",
        also=("--nnodes", "--nnode", "--num-machines"),
        type=node_range,
        metavar="N|MIN:MAX",
        help="Use the first N hosts; MIN:MAX: as many as there are, and restart with at least MIN.",
    ),
)
# How they are reached.
REACHING = (
    _hosts("--setup", default="", metavar="CMD", help="Shell command to run first on each host, this one included."),
    _hosts("--venv-script", metavar="FILE", help="Shell script to source first on each host, this one included."),
    _ssh(
        "--ssh",
        type=click.Choice(WAYS),
        default="auto",
        help="SSH client: paramiko (in this process) or openssh (the system's ssh). Default: auto, which is openssh"
        " where the SSH config needs it.",
    ),
    _ssh("--ssh-port", type=Number(LIMITS["ssh_port"]), help="SSH port. Default: that of the SSH config, else 22."),
    _ssh(
        "-F",
        "--ssh-config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="SSH config. Default: ~/.ssh/config.",
    ),
    _ssh(
        "--remote-python",
        metavar="PATH",
        help="Python interpreter on the other hosts. Default: the same path as here.",
    ),
    _ssh("--force-multi", is_flag=True, help="Reach this machine over SSH as well."),
    _ssh(
        "--accept-new-host-keys",
        is_flag=True,
        help="Record the SSH host keys of unknown hosts instead of refusing them.",
    ),
    under("Output")(
        "-v",
        "--verbose",
        also=("--debug",),
        is_flag=True,
        callback=note_debugging,
        help="Show SSH, the agent protocol, and tracebacks of errors of launch, on stderr.",
    ),
)


def ssh_options(values: Mapping[str, Any]) -> SshOptions:
    """Return what the values of these options, by name, say about SSH."""
    script = values["venv_script"] or ""
    if "/" not in script:  # a POSIX shell would look for it in PATH
        script = f"./{script}"
    source = [f". {shlex.quote(script)}"] if values["venv_script"] else []
    setup = " && ".join([*source, *([values["setup"]] if values["setup"] else [])])
    return filled(SshOptions, {**values, "setup": setup})


def default_hostfile() -> str | None:
    """Return the hostfile that DeepSpeed reads when none is named, None where there is no such file.

    A rank that starts `launch` itself runs on the machine it is on.
    """
    is_there = env.JOB_ID.name not in os.environ and os.path.isfile(DEFAULT_HOSTFILE)
    return DEFAULT_HOSTFILE if is_there else None
