"""The hosts that commands which work on many of them mean: `launch check`, `launch exec`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from launcher.base.errors import UsageError
from launcher.base.fields import filled
from launcher.base.units import printable
from launcher.cli.options.command import declared
from launcher.cli.options.hosts import DEFAULT_HOSTFILE_NOTE, HOST_CHOICE, REACHING, default_hostfile, ssh_options
from launcher.cluster.cluster import Cluster, Host, NodeRange
from launcher.cluster.devices import local_device_tokens
from launcher.fleet.transports import SshTransports, Transports
from launcher.plan.planning import available_hosts
from launcher.schedulers.detect import in_allocation
from launcher.transport.ssh.options import SshOptions


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The values of these options, by name."""

    hostfile: str | None = None
    include: str = ""
    exclude: str = ""
    num_nodes: NodeRange | None = None
    force_multi: bool = False
    in_slurm: bool  # the hosts are those of the Slurm allocation this command runs in
    ssh: SshOptions

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> HostOptions:
        """Return what the options of a command say, of which these are some."""
        in_slurm = values["hostfile"] is None and in_allocation(os.environ)
        return filled(cls, {**values, "in_slurm": in_slurm, "ssh": ssh_options(values)})

    def transports(self, cluster: Cluster, *, shell_only: bool = False) -> Transports:
        """Return how the hosts are reached. Raises: UsageError.

        shell_only: start a plain shell there, not an agent; a Slurm step knows agents only.
        """
        if self.in_slurm:
            from launcher.slurm.srun import SrunTransport

            return SrunTransport.of(self.ssh, cluster)
        transports = SshTransports(self.ssh, only_ssh=self.force_multi, shell_only=shell_only)
        for note in transports.notes_on(cluster.hosts) if self.ssh.verbose else ():
            click.echo(printable(note), err=True)
        return transports

    def cluster(self) -> Cluster:
        """Return the hosts that are meant: those of the hostfile, of the Slurm allocation, else this machine.

        Raises: HostfileError, UsageError.
        """
        hostfile = self.hostfile
        if hostfile is None and not self.in_slurm and (hostfile := default_hostfile()) is not None:
            click.echo(DEFAULT_HOSTFILE_NOTE, err=True)
        available = available_hosts(hostfile, in_slurm=self.in_slurm)
        count = None if self.num_nodes is None else self.num_nodes.of(1 if available is None else len(available.hosts))
        if available is not None:
            from launcher.cluster.filters import select

            source = "Slurm" if self.in_slurm else "hostfile"
            return select(available, include=self.include, exclude=self.exclude, num_nodes=count, source=source)
        if self.include or self.exclude or count not in (None, 1):
            raise UsageError(
                "--include, --exclude and --num-nodes choose among the hosts of a hostfile, and there is none",
                hint="name one with --hostfile",
            )
        return Cluster((Host("localhost", tuple(range(len(local_device_tokens(os.environ)) or 1))),))


host_options = declared((*HOST_CHOICE, *REACHING))  # a command gets them as keywords, for `HostOptions.of`
