"""How the hosts of a command are reached: this machine's own processes, or SSH."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from launcher.cluster.cluster import Host
from launcher.transport.api import Transport
from launcher.transport.fanout import is_local
from launcher.transport.local import LocalTransport
from launcher.transport.ssh import SshOptions, SshTransport
from launcher.transport.ssh_pool import SshPool, allow_files, helper_count


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

    def __init__(self, ssh: SshOptions, *, only_local: bool = False, only_ssh: bool = False) -> None:
        """only_local: every host is this machine. only_ssh: not even `localhost` is."""
        self._only_local = only_local
        self._only_ssh = only_ssh
        self._local = LocalTransport(shell_only=ssh.shell_only)
        self._options = ssh
        self._ssh = SshTransport(ssh)
        self._pool: SshPool | None = None

    def prepare(self, hosts: Sequence[Host]) -> None:
        """Start the processes that hold the SSH connections when these are many. Raises: UsageError, TransportError."""
        num_ssh = sum(self.for_host(host) is not self._local for host in hosts)
        allow_files(num_ssh)
        num_helpers = 0 if self._pool is not None else helper_count(num_ssh)
        if num_helpers:
            self._pool = SshPool(self._options, num_helpers)

    def for_host(self, host: Host) -> Transport:
        """Return the transport that reaches `host`."""
        if self._only_local or (is_local(host.name) and not self._only_ssh):
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
        self._ssh.close()
        self._local.close()
