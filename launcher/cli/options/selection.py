"""The hosts that commands which work on many of them mean: `launch check`, `launch exec`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from launcher.base.errors import UsageError
from launcher.cli.options.hosts import DEFAULT_HOSTFILE_NOTE, HOST_CHOICE, REACHING, Reaching, default_hostfile
from launcher.cluster.cluster import Cluster, Host
from launcher.cluster.devices import local_slots
from launcher.job.offered import offered_hosts
from launcher.job.reach import AllocationTransports, Reach, Transports
from launcher.slurm.allocation import in_allocation

_F = TypeVar("_F", bound=Callable[..., Any])


class HostOptions(Reaching):
    """The options of one command, by name."""

    @property
    def in_slurm(self) -> bool:
        """Whether the hosts are those of the Slurm allocation this command runs in."""
        return self.hostfile is None and in_allocation(os.environ)

    def reach(self, cluster: Cluster, *, shell_only: bool = False) -> Reach:
        """Return how the hosts are reached. Raises: UsageError.

        shell_only: start a plain shell there, not an agent; a Slurm step knows agents only.
        """
        if self.in_slurm:
            return AllocationTransports(self, cluster)
        transports = Transports(self, only_ssh=self.force_multi, shell_only=shell_only)
        for note in transports.notes_on(cluster.hosts) if self.verbose else ():
            click.echo(note, err=True)
        return transports

    def cluster(self) -> Cluster:
        """Return the hosts that are meant: those of the hostfile, of the Slurm allocation, else this machine.

        Raises: HostfileError, UsageError.
        """
        hostfile = self.hostfile
        if hostfile is None and not self.in_slurm and (hostfile := default_hostfile()) is not None:
            click.echo(DEFAULT_HOSTFILE_NOTE, err=True)
        offered = offered_hosts(hostfile, in_slurm=self.in_slurm)
        count = None if self.num_nodes is None else self.num_nodes.of(1 if offered is None else len(offered.hosts))
        if offered is not None:
            from launcher.cluster.filters import select

            return select(offered, include=self.include, exclude=self.exclude, num_nodes=count)
        if self.include or self.exclude or count not in (None, 1):
            raise UsageError(
                "--include, --exclude and --num-nodes choose among the hosts of a hostfile, and there is none",
                hint="name one with --hostfile",
            )
        return Cluster((Host("localhost", local_slots(os.environ) or (0,)),))


def host_options(function: _F) -> _F:
    """Add the options of `HostOptions` to a click command; it gets them as keywords of the same names."""
    decorated: Any = function
    for option in reversed((*HOST_CHOICE, *REACHING)):
        decorated = option(decorated)
    result: _F = decorated
    return result
