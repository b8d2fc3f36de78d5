"""How the hosts of a command are reached: by this machine's own processes, or over SSH; those of Slurm by its srun."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from launcher.base.fields import named
from launcher.base.processes import allow_connections
from launcher.cluster.cluster import Host
from launcher.transport.local import LocalTransport, is_local

if TYPE_CHECKING:
    from launcher.transport.api import Transport
    from launcher.transport.openssh import OpenSshTransport
    from launcher.transport.ssh.config import Targets
    from launcher.transport.ssh.options import SshOptions
    from launcher.transport.ssh.transport import SshTransport


class Transports(Protocol):
    """How the hosts of a run are reached: `SshTransports`, or in an allocation `slurm.srun.SrunTransport`."""

    def prepare(self, hosts: Sequence[Host]) -> None:
        """Learn which hosts the next run uses, before any is opened."""
        ...

    def for_host(self, host: Host) -> Transport:
        """Return the transport that reaches `host`."""
        ...

    def address_of(self, host: Host) -> str:
        """Return the address other nodes reach `host` by."""
        ...

    def notes_on(self, hosts: Sequence[Host]) -> tuple[str, ...]:
        """Return what a user should know about how `hosts` are reached."""
        ...

    def close(self) -> None:
        """Close every connection."""
        ...


class SshTransports:
    """The transport of each host: this machine's own, or for all others one SSH transport of each kind."""

    def __init__(
        self,
        options: SshOptions,
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
        self._options = replace(options, shell_only=shell_only)
        self._only_local = only_local
        self._only_ssh = only_ssh
        self._local = local or LocalTransport(shell_only=shell_only, setup=options.setup)
        self._opened: list[Transport] = []  # those over SSH
        self._reasons: dict[Host, str | None] = {}
        self._lock = threading.Lock()  # hosts are opened by many threads, and one transport is to hold them all

    def prepare(self, hosts: Sequence[Host]) -> None:
        """Allow for the files of so many agents, and learn how hosts are reached. Raises: UsageError."""
        if len(hosts) == 1 and self._is_here(hosts[0]):
            return
        allow_connections(len(hosts))
        self._ask_for(hosts)

    def for_host(self, host: Host) -> Transport:
        """Return the transport that reaches `host`."""
        if self._is_here(host):
            return self._local
        reason = self._reason(host)  # not under the lock: an answer may take long
        with self._lock:
            return self._paramiko if reason is None else self._openssh

    def address_of(self, host: Host) -> str:
        """Return the address other nodes reach `host` by: HostName of the SSH config, else its name."""
        return self._targets.of(host).address

    def notes_on(self, hosts: Sequence[Host]) -> tuple[str, ...]:
        """Return which of `hosts` are reached by the system's ssh, and why, where `--ssh` left the choice to us."""
        names: dict[str, list[str]] = {}
        for host in self._ask_for(hosts) if self._options.ssh == "auto" else ():
            if reason := self._reason(host):
                names.setdefault(reason, []).append(host.name)
        if not names:
            return ()
        from launcher.cluster.nodeset import fold

        return tuple(f"{fold(hosts)}: by the system's ssh, for {reason}" for reason, hosts in names.items())

    def close(self) -> None:
        """Close every connection."""
        for opened in (*self._opened, self._local):
            opened.close()

    def _ask_for(self, hosts: Sequence[Host]) -> list[Host]:
        """Learn how those of `hosts` are reached that are reached over SSH; return these."""
        others = [host for host in hosts if not self._is_here(host)]
        if others and self._options.ssh != "openssh":
            self._targets.ask_for(others)
        return others

    def _reason(self, host: Host) -> str | None:
        """Return why the system's ssh reaches `host`, None where paramiko does."""
        if self._options.ssh != "auto":
            return named("ssh") if self._options.ssh == "openssh" else None
        from launcher.transport.ssh.choice import reason_for_openssh

        if host not in self._reasons:
            self._reasons[host] = reason_for_openssh(host, self._targets)
        return self._reasons[host]

    # Each is imported when a host needs it: 20 ms and more that a job on this machine does not pay.

    @functools.cached_property
    def _targets(self) -> Targets:
        from launcher.transport.ssh.config import Targets

        return Targets(self._options)

    @functools.cached_property
    def _openssh(self) -> OpenSshTransport:
        from launcher.transport.openssh import OpenSshTransport

        transport = OpenSshTransport(self._options, self._targets)
        self._opened.append(transport)
        return transport

    @functools.cached_property
    def _paramiko(self) -> SshTransport:
        from launcher.transport.ssh.transport import SshTransport

        transport = SshTransport(self._options, self._targets)
        self._opened.append(transport)
        return transport

    def _is_here(self, host: Host) -> bool:
        return self._only_local or (is_local(host.name) and not self._only_ssh)
