"""How the hosts of a command are reached: by this machine's own processes, over SSH, or by srun."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from launcher.base.errors import UsageError
from launcher.cluster.cluster import Cluster, Host
from launcher.transport.local import LocalTransport, is_local

if TYPE_CHECKING:
    from launcher.slurm.srun import SrunTransport
    from launcher.transport.api import Transport
    from launcher.transport.ssh.config import SshOptions
    from launcher.transport.ssh.pool import SshPool
    from launcher.transport.ssh.transport import SshTransport


class ReachOptions(Protocol):
    """What reaching hosts depends on."""

    @property
    def ssh_options(self) -> SshOptions:
        """How hosts are reached over SSH."""

    @property
    def shell_setup(self) -> str:
        """Shell text that runs on a host first."""

    @property
    def remote_python(self) -> str | None:
        """Python on the other hosts; None: this one's path."""


class Reach(Protocol):
    """How the hosts of a run are reached."""

    def prepare(self, hosts: Sequence[Host]) -> None:
        """Learn which hosts the next run uses, before any is opened."""
        ...

    def for_host(self, host: Host) -> Transport:
        """Return the transport that reaches `host`."""
        ...

    def address_of(self, host: Host) -> str:
        """Return the address other nodes reach `host` by."""
        ...

    def close(self) -> None:
        """Close every connection."""
        ...


class Transports:
    """The transport of each host: this machine's own, or one SSH transport for all others."""

    def __init__(
        self,
        options: ReachOptions,
        *,
        only_local: bool = False,
        only_ssh: bool = False,
        shell_only: bool = False,
        local: LocalTransport | None = None,
    ) -> None:
        """Connect to nothing yet.

        only_local: every host is this machine. only_ssh: not even `localhost` is. shell_only: a plain shell is started
        on hosts instead of an agent. local: reaches this machine.
        """
        self._options = options
        self._only_local = only_local
        self._only_ssh = only_ssh
        self._shell_only = shell_only
        self._local = local or LocalTransport(shell_only=shell_only)
        self._opened_ssh: SshTransport | None = None
        self._lock = threading.Lock()  # hosts are opened by many threads, and one transport is to hold them all
        self._pool: SshPool | None = None

    def prepare(self, hosts: Sequence[Host]) -> None:
        """Allow for the files of so many agents, and start the processes that hold SSH connections when these are many.

        Raises: UsageError, TransportError.
        """
        if len(hosts) == 1 and self._is_here(hosts[0]):
            return
        num_ssh = sum(not self._is_here(host) for host in hosts)
        from launcher.transport.ssh.pool_size import allow_connections, helper_count

        config = self._ssh_options().config_file
        # No other process can read a pipe (`-F <(...)`) again.
        can_help = self._pool is None and (config is None or config.is_file())
        num_helpers = helper_count(num_ssh) if can_help else 0
        allow_connections(len(hosts), has_helpers=bool(num_helpers) or self._pool is not None)
        if num_helpers:
            from launcher.transport.ssh.pool import SshPool

            self._pool = SshPool(self._ssh_options(), num_helpers)

    def for_host(self, host: Host) -> Transport:
        """Return the transport that reaches `host`."""
        if self._is_here(host):
            return self._local
        return self._pool or self._ssh

    def address_of(self, host: Host) -> str:
        """Return the address other nodes reach `host` by: HostName of the SSH config, else its name."""
        return self._ssh.target(host).address

    def close(self) -> None:
        """Close every connection."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._opened_ssh is not None:
            self._opened_ssh.close()
        self._local.close()

    @property
    def _ssh(self) -> SshTransport:
        with self._lock:
            if self._opened_ssh is None:
                from launcher.transport.ssh.transport import (
                    SshTransport,  # 20 ms that a job on this machine does not pay
                )

                self._opened_ssh = SshTransport(self._ssh_options())
            return self._opened_ssh

    def _ssh_options(self) -> SshOptions:
        from dataclasses import replace

        return replace(self._options.ssh_options, shell_only=self._shell_only)

    def _is_here(self, host: Host) -> bool:
        return self._only_local or (is_local(host.name) and not self._only_ssh)


class AllocationTransports:
    """One srun step reaches every host of a run; a restart gets a new one."""

    def __init__(self, options: ReachOptions, cluster: Cluster) -> None:
        if options.shell_setup:
            raise UsageError(
                "--setup and --venv-script are for hosts reached over SSH; srun passes this environment on",
                hint="put the commands into the batch script, before `launch`",
            )
        from launcher.slurm.srun import SrunTransport

        self._python = options.remote_python
        self._srun = SrunTransport([host for host in cluster.hosts if host.slots], python=self._python)

    def prepare(self, hosts: Sequence[Host]) -> None:
        """Begin a new step with the next host that is opened."""
        from launcher.slurm.srun import SrunTransport

        self._srun.close()
        self._srun = SrunTransport(hosts, python=self._python)

    def for_host(self, host: Host) -> SrunTransport:
        """Return the transport that reaches `host`."""
        return self._srun

    def address_of(self, host: Host) -> str:
        """Return the address other nodes reach `host` by: its node name."""
        return host.name

    def close(self) -> None:
        """End every step."""
        self._srun.close()
