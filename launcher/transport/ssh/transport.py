"""Agents, or plain shells, over SSH, with paramiko in this process: no `ssh` child per host, one connection per host.

paramiko is imported inside functions: commands that reach no host must not pay its start-up time.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from launcher.base.errors import Diagnostic, TransportError
from launcher.base.fields import named
from launcher.cluster.cluster import Host
from launcher.transport.api import StderrTail
from launcher.transport.ssh import library
from launcher.transport.ssh.config import SshTarget, Targets
from launcher.transport.ssh.connect import DroppedError, connect, end_connections, open_jump
from launcher.transport.ssh.options import SshOptions

if TYPE_CHECKING:
    import paramiko

_TAIL_WAIT_S = 0.5
_RETRY_DELAYS_S = (0.3, 1.0, 2.0)
_WINDOW_BYTES = 8 * 1024 * 1024


class SshTransport:
    """Starts agents over SSH; implements `Transport`. Connections are kept until `close`."""

    name = "ssh"

    def __init__(self, options: SshOptions | None = None, targets: Targets | None = None) -> None:
        """targets: what is known already of the configuration that `options` names."""
        self._options = options or SshOptions()
        self._targets = targets or Targets(self._options)
        if self._options.verbose:
            library.log_to_stderr()
        self._lock = threading.Lock()
        self._connections: dict[tuple[str, ...], paramiko.Transport] = {}
        self._locks: dict[tuple[str, ...], threading.Lock] = {}
        self._failures: dict[tuple[str, ...], tuple[float, TransportError]] = {}  # the last of each way, and when
        self._closed = False
        self._numbers = itertools.count(2)

    def command_for(self, host: Host) -> str:
        return self._options.remote_command

    def target(self, host: Host) -> SshTarget:
        """Return how `host` would be reached; reads the SSH config only. Raises: TransportError."""
        return self._targets.of(host)

    def open(self, host: Host) -> SshChannel:
        route = self._targets.route(host)
        for hop in route:
            if "ProxyCommand" in hop.only_openssh:
                raise TransportError(
                    f"ProxyCommand of the SSH config for {hop.name} needs the system's ssh",
                    where=host.name,
                    hint=f"leave out {named('ssh')} paramiko, or use ProxyJump",
                )
        target = route[-1]
        session = self._open_session(route)
        with _answer_expected(target, "start a command"):
            self._execute(session, self.command_for(host), target.connect_timeout_s)
        return SshChannel(target, session)

    @staticmethod
    def _execute(session: paramiko.Channel, command: str, timeout_s: float) -> None:
        """Ask the server to run a command. paramiko waits for the answer without end: closing the session ends that."""
        timer = threading.Timer(timeout_s, session.close)
        timer.daemon = True
        timer.start()
        try:
            session.exec_command(command)
        finally:
            timer.cancel()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections, self._connections = self._connections, {}
        # Dictionaries keep their order: a jump host was connected before what lies behind it.
        for key, connection in reversed(connections.items()):
            if len(key) > 1:
                end_connections([connection])
        end_connections(connection for key, connection in connections.items() if len(key) == 1)

    def _open_session(self, route: Sequence[SshTarget]) -> paramiko.Channel:
        """Open a session on the connection that all names of a server share.

        Where the server allows no more of them on one connection (MaxSessions), this one gets a connection of its own.
        """
        from paramiko import SSHException

        target = route[-1]
        connection = self._connect_patiently(route)
        start_s = time.monotonic()
        with _answer_expected(target, "open a session"):
            try:
                return connection.open_session(_WINDOW_BYTES, timeout=target.connect_timeout_s)
            except SSHException:
                # The type says little: paramiko keeps one error for a connection, and of several threads that are
                # refused at the same time one gets the ChannelException.
                is_late = time.monotonic() - start_s >= target.connect_timeout_s
                if is_late or not connection.is_active():
                    raise
        connection = self._connect_patiently(route, f"connection {next(self._numbers)}")
        with _answer_expected(target, "open a session"):
            return connection.open_session(_WINDOW_BYTES, timeout=target.connect_timeout_s)

    def _connect_patiently(self, route: Sequence[SshTarget], label: str = "") -> paramiko.Transport:
        """Connect; a server that drops the connection is asked again a little later.

        label: tells this connection to the server from the shared one, which has none. Raises: TransportError.
        """
        for delay_s in _RETRY_DELAYS_S:
            try:
                return self._connect_route(route, label)
            except DroppedError:
                time.sleep(delay_s * random.uniform(0.5, 1.5))  # not all hosts' threads at the same moment
        return self._connect_route(route, label)

    def _connect_route(self, route: Sequence[SshTarget], label: str) -> paramiko.Transport:
        """Return the kept connection to the end of `route`, or make it, sharing jump hosts."""
        connection: paramiko.Transport | None = None
        for index, target in enumerate(route):
            key = tuple(hop.login for hop in route[: index + 1])
            if label and target is route[-1]:
                key = (*key, label)
            with self._lock:
                lock = self._locks.setdefault(key, threading.Lock())
            asked_s = time.monotonic()
            with lock:  # never two at once: no lock is held while another is taken, but for the short self._lock
                known = self._connections.get(key)
                if known is None or not known.is_active():
                    self._raise_failure_since(asked_s, key, target)
                    way = partial(open_jump, connection, route[index - 1], target) if connection else None
                    try:
                        known = self._keep(key, connect(target, way), target)
                    except TransportError as error:
                        self._failures[key] = time.monotonic(), error
                        raise
                connection = known
        if connection is None:
            raise ValueError("a route has at least one target")
        return connection

    def _raise_failure_since(self, asked_s: float, key: tuple[str, ...], target: SshTarget) -> None:
        """Raise what another name of this server was answered while this one waited: it would be answered the same."""
        failed_s, error = self._failures.get(key, (-math.inf, None))
        if error is not None and failed_s > asked_s:
            found = [Diagnostic(d.message, target.name, d.hint, d.shared) for d in error.diagnostics]
            raise type(error).from_diagnostics(found)

    def _keep(self, key: tuple[str, ...], connection: paramiko.Transport, target: SshTarget) -> paramiko.Transport:
        with self._lock:
            if not self._closed:
                self._connections[key] = connection
                return connection
        end_connections([connection])
        raise TransportError("the transport was closed while connecting", where=target.name)


@contextlib.contextmanager
def _answer_expected(target: SshTarget, step: str) -> Iterator[None]:
    """Raise TransportError that names the step when the server fails in it, or gives no answer in time."""
    start_s = time.monotonic()
    try:
        yield
    except library.failures() as error:
        if time.monotonic() - start_s >= target.connect_timeout_s:
            problem = f"its server did not {step} within {target.connect_timeout_s:g} s"
            question = "is the home folder there on a disk that answers? "
        else:
            problem, question = f"no command could be started: {library.cause_of(error)}", ""
        raise TransportError(
            f"connected as {target.login}, but {problem}",
            where=target.name,
            hint=f"{question}try: {target.ssh_command} true",
        ) from None


class SshChannel:
    """One SSH session that runs the agent or a shell; implements `Channel`."""

    window_bytes = None

    def __init__(self, target: SshTarget, session: paramiko.Channel) -> None:
        self.host_name = target.name
        self.target = target  # how the host was reached, for messages
        self._session = session
        self._write_lock = threading.Lock()
        self._stderr = StderrTail(session.recv_stderr, target.name)

    def read(self, max_bytes: int) -> bytes:
        try:
            return self._session.recv(max_bytes)
        except OSError:
            return b""

    def write(self, data: bytes) -> None:
        with self._write_lock:
            try:
                self._session.sendall(data)
            except OSError:
                raise TransportError(
                    f"the connection to {self.target.login} is gone",
                    where=self.host_name,
                    hint=self.stderr_tail() or f"try: {self.target.ssh_command} true",
                ) from None

    def close_stdin(self) -> None:
        try:
            self._session.shutdown_write()
        except (OSError, EOFError):  # the connection has ended, and with it the agent's stdin
            return

    def stderr_tail(self) -> str:
        return self._stderr.text(_TAIL_WAIT_S if self._session.exit_status_ready() else 0.0)

    def listen_stderr(self, take: Callable[[bytes], None]) -> None:
        self._stderr.listen(take)

    def wait(self, timeout_s: float) -> int | None:
        """Return the agent's exit status; None while it runs, and when a signal or a lost connection ended
        it without a status."""
        if not self._session.status_event.wait(timeout_s) or self._session.exit_status < 0:
            return None
        return self._session.exit_status

    def close(self) -> None:
        self._session.close()
