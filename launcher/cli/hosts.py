"""The options of commands that work on many hosts, and the hosts they mean."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from launcher.base.errors import UsageError
from launcher.cli.reach import Reach, Transports
from launcher.cluster.cluster import Cluster, Host
from launcher.cluster.devices import local_slots
from launcher.cluster.filters import select
from launcher.cluster.hostfile import read_hostfile
from launcher.cluster.nodeset import MAX_EXPANSION
from launcher.cluster.slurm import in_allocation
from launcher.transport.ssh_config import SshOptions

_F = TypeVar("_F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "-H",
        "--hostfile",
        type=click.Path(),
        help="File of `host slots=N` lines. Default: the Slurm job, else this machine.",
    ),
    click.option("-i", "--include", default="", metavar="HOST[:SLOT,..]@..", help="Use these hosts and slots only."),
    click.option("-e", "--exclude", default="", metavar="HOST[:SLOT,..]@..", help="Leave these hosts or slots out."),
    click.option(
        "--num_nodes", "--num-nodes", "num_nodes", type=click.IntRange(1, MAX_EXPANSION), help="Use the first N hosts."
    ),
    click.option(
        "--ssh_port", "--ssh-port", "ssh_port", type=click.IntRange(1, 65535), help="Default: ~/.ssh/config, 22."
    ),
    click.option(
        "-F", "--ssh_config", "--ssh-config", "ssh_config", type=click.Path(), help="Instead of ~/.ssh/config."
    ),
    click.option(
        "--remote_python",
        "--remote-python",
        "remote_python",
        help="Python on the other hosts. Default: this one's path.",
    ),
    click.option(
        "--force_multi", "--force-multi", "force_multi", is_flag=True, help="Use SSH for this machine's name too."
    ),
    click.option(
        "--accept_new_host_keys",
        "--accept-new-host-keys",
        "accept_new_host_keys",
        is_flag=True,
        help="Record the SSH keys of hosts never seen before instead of refusing them.",
    ),
    click.option("--setup", default="", metavar="CMD", help="Shell text to run on a host first."),
    click.option("--venv_script", "--venv-script", "venv_script", metavar="FILE", help="Source FILE on a host first."),
)


@dataclass(frozen=True)
class HostOptions:
    """The options of one command, by name."""

    hostfile: str | None = None
    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    ssh_port: int | None = None
    ssh_config: str | None = None
    remote_python: str | None = None
    force_multi: bool = False
    accept_new_host_keys: bool = False
    setup: str = ""
    venv_script: str | None = None

    @property
    def shell_setup(self) -> str:
        """Shell text that runs on a host before anything of ours."""
        source = [f". {shlex.quote(self.venv_script)}"] if self.venv_script else []
        return " && ".join([*source, *([self.setup] if self.setup else [])])

    @property
    def ssh_options(self) -> SshOptions:
        """How hosts are reached over SSH."""
        return SshOptions(
            port=self.ssh_port,
            config_file=Path(self.ssh_config) if self.ssh_config else None,
            python=self.remote_python,
            setup=self.shell_setup,
            accept_new_host_keys=self.accept_new_host_keys,
        )

    @property
    def in_slurm(self) -> bool:
        """Say whether the hosts are those of the Slurm allocation this command runs in."""
        return self.hostfile is None and in_allocation(os.environ)

    def reach(self, cluster: Cluster, *, shell_only: bool = False) -> Reach:
        """Return how the hosts are reached. Raises: UsageError.

        shell_only: start a plain shell there, not an agent; a Slurm step knows agents only.
        """
        if self.in_slurm:
            from launcher.cli.slurm import AllocationTransports

            return AllocationTransports(self, cluster)
        return Transports(replace(self.ssh_options, shell_only=shell_only), only_ssh=self.force_multi)

    def cluster(self) -> Cluster:
        """Return the hosts that are meant: those of the hostfile, of the Slurm allocation, else this machine.

        Raises: HostfileError, UsageError.
        """
        if self.hostfile is not None or self.in_slurm:
            if self.hostfile is not None:
                cluster = read_hostfile(Path(self.hostfile))
            else:
                from launcher.cli.slurm import allocation

                cluster = allocation(None)
            return select(cluster, include=self.include, exclude=self.exclude, num_nodes=self.num_nodes)
        if self.include or self.exclude or self.num_nodes not in (None, 1):
            raise UsageError(
                "--include, --exclude and --num_nodes choose among the hosts of a hostfile, and there is none",
                hint="name one with --hostfile",
            )
        return Cluster((Host("localhost", local_slots(os.environ) or (0,)),))


def host_options(function: _F) -> _F:
    """Add the options of `HostOptions` to a click command; it gets them as keywords of the same names."""
    decorated: Any = function
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    result: _F = decorated
    return result
