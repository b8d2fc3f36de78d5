"""Make one authenticated SSH connection, or say exactly why not and what to do.

Order: TCP (or a channel through a jump host), key exchange, host key check, public key login. The host key is
checked before any key is offered. Nothing is ever accepted or written on the user's behalf.
"""

from __future__ import annotations

import contextlib
import functools
import shlex
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launcher.base.errors import TransportError
from launcher.transport import ssh_library
from launcher.transport.known_hosts import KnownKey, Verdict, check_key, find_keys, lookup_name, record_key
from launcher.transport.ssh_config import SshTarget

if TYPE_CHECKING:
    import paramiko

_KEEPALIVE_S = 15
_IDLE_CHECK_S = 5.0
_TCP_USER_TIMEOUT_MS = 30_000  # unacknowledged data this old ends the connection: a node crashed or is cut off
_READ_AHEAD_BYTES = 1 << 15
_MAX_OFFERED_KEYS = 6  # sshd's MaxAuthTries: an agent full of keys must not use up the tries of the right one


def connect(target: SshTarget, via: paramiko.Channel | None) -> paramiko.Transport:
    """Connect and log in to `target`, through `via` when it lies behind a jump host.

    Raises: TransportError naming host, user, port and remedy.
    """
    sock = via if via is not None else _tcp(target)
    ssh_library.load()  # while the server greets us
    known = find_keys(_known_name(target), target.known_hosts_files)
    connection = _start(target, sock, known)
    try:
        _verify(target, connection, known)
        _authenticate(target, connection)
        connection.set_keepalive(_KEEPALIVE_S)
        # paramiko's thread looks up from its socket ten times a second, which for 250 idle connections is a tenth of a
        # core. Nothing it looks for is urgent; `end_connection` wakes it.
        connection.sock.settimeout(_IDLE_CHECK_S)
    except BaseException:  # Ctrl-C included: the connection's thread must not live on
        connection.close()
        raise
    return connection


def end_connection(connection: paramiko.Transport) -> None:
    """Close a connection that `connect` made. Its thread is woken first: it may wait on the descriptor."""
    with contextlib.suppress(OSError, EOFError):
        connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def open_jump(connection: paramiko.Transport, jump: SshTarget, target: SshTarget) -> paramiko.Channel:
    """Open a TCP channel from the jump host to `target`. Raises: TransportError."""
    from paramiko import SSHException

    try:
        return connection.open_channel(
            "direct-tcpip", (target.address, target.port), ("127.0.0.1", 0), timeout=target.connect_timeout_s
        )
    except (SSHException, OSError, EOFError) as error:
        raise TransportError(
            f"jump host {jump.login} cannot reach {target.address} port {target.port}: {error}",
            where=target.name,
            hint=f"try: {target.ssh_command} true",
        ) from None


class EagerSocket(socket.socket):
    """A socket whose `recv` takes what has arrived all at once, and gives it out piece by piece.

    paramiko reads each packet in two steps. Every step that asks the system lets go of the interpreter lock, and then
    stands in line for it behind the threads of all other connections.
    """

    _ahead = b""

    def recv(self, max_bytes: int, flags: int = 0, /) -> bytes:
        data = self._ahead or super().recv(max(max_bytes, _READ_AHEAD_BYTES), flags)
        self._ahead = data[max_bytes:]
        return data[:max_bytes]


def _tcp(target: SshTarget) -> socket.socket:
    try:
        sock = socket.create_connection((target.address, target.port), target.connect_timeout_s)
    except (socket.gaierror, UnicodeError):
        _fail(
            target,
            f'host name "{target.address}" cannot be resolved',
            "check its spelling, or give it a HostName in ~/.ssh/config",
        )
    except TimeoutError:
        waited = f"{target.connect_timeout_s:g} s"
        _fail(target, f"no answer from {target.login} within {waited}", "is the host up, and the port open?")
    except ConnectionRefusedError:
        _fail(target, f"connection refused by {target.login}", "is sshd running there, on this port?")
    except OSError as error:
        _fail(target, f"{target.login} cannot be reached: {error.strerror or error}")
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_S),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", _TCP_USER_TIMEOUT_MS),
    ):
        option = getattr(socket, name, None)  # not every platform has every option
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return EagerSocket(fileno=sock.detach())  # paramiko sets the timeout it wants


def _start(target: SshTarget, sock: socket.socket | paramiko.Channel, known: list[KnownKey]) -> paramiko.Transport:
    """Exchange keys with the server.

    Algorithms of keys already known are preferred, as OpenSSH does: a server with several host keys
    must be asked for one that can be compared.
    """
    import paramiko

    connection = paramiko.Transport(sock)
    connection.banner_timeout = connection.auth_timeout = connection.handshake_timeout = target.connect_timeout_s
    known_types = {key.key_type for key in known}
    security = connection.get_security_options()
    offered = tuple(security.key_types)
    # First those that check a packet themselves: paramiko compares digests byte by byte, in Python.
    security.ciphers = tuple(sorted(security.ciphers, key=lambda name: "-gcm@" not in name))
    security.key_types = tuple(sorted(offered, key=lambda name: _base_type(name) not in known_types))
    done, start_s = threading.Event(), time.monotonic()
    connection.start_client(done)
    finished = done.wait(target.connect_timeout_s)
    error = connection.get_exception()
    if finished and error is None and connection.is_active():
        return connection
    connection.close()
    question = "is it an sshd that listens there, and does it accept more?"
    if not finished or time.monotonic() - start_s > 0.9 * target.connect_timeout_s:
        _fail(target, f"{target.login}: no SSH answer within {target.connect_timeout_s:g} s", question)
    # An sshd with many logins under way drops some of them at random (MaxStartups): the next try may get through.
    try:
        _fail(target, f"{target.login}: SSH negotiation failed: {error or 'the connection was closed'}", question)
    except TransportError as failure:
        raise DroppedError.from_diagnostics(failure.diagnostics) from None


class DroppedError(TransportError):
    """The server dropped the connection before the login; worth another try."""


def _base_type(name: str) -> str:
    """Return the known_hosts type of a host key algorithm: RSA keys are listed as ssh-rsa for any hash."""
    return "ssh-rsa" if name.startswith("rsa-sha2-") else name


def _known_name(target: SshTarget) -> str:
    return target.host_key_name or lookup_name(target.address, target.port)


def _verify(target: SshTarget, connection: paramiko.Transport, known: list[KnownKey]) -> None:
    key = connection.get_remote_server_key()
    finding = check_key(known, key.asbytes())
    if finding.verdict is Verdict.KNOWN:
        return
    name = _known_name(target)
    shown = f"{key.get_name()} {key.fingerprint}"
    if finding.key is None and target.accept_new_host_keys and target.known_hosts_files:
        own = target.known_hosts_files[0]
        try:
            record_key(own, name, key.get_name(), key.asbytes())
        except OSError as error:
            _fail(target, f"the host key cannot be recorded in {own}: {error.strerror}")
        return
    if finding.key is None:
        file = target.known_hosts_files[0] if target.known_hosts_files else "~/.ssh/known_hosts"
        accept = f"{target.ssh_command} true"
        raise TransportError(
            f"host key of {target.login} is not known ({shown})",
            where=target.name,
            hint=f"compare the fingerprint and accept it with: {accept}; or, on a network you trust, with: "
            f"ssh-keyscan -p {target.port} {target.address} >> {file}",
        )
    place = f"{finding.key.file}:{finding.key.line}"
    if finding.verdict is Verdict.REVOKED:
        raise TransportError(f"host key of {target.login} is revoked ({shown})", where=place)
    raise TransportError(
        f"host key of {target.login} has changed: the server shows {shown}, {place} has another",
        where=target.name,
        hint="somebody may be listening in; ask who runs the host, then forget the old key with: "
        f"ssh-keygen -f {shlex.quote(str(finding.key.file))} -R {shlex.quote(name)}",
    )


def _authenticate(target: SshTarget, connection: paramiko.Transport) -> None:
    import paramiko

    problems: list[str] = []
    offered: list[str] = []
    agent = paramiko.Agent() if target.use_agent else None
    try:
        for label, key in _keys(target, agent, problems):
            if len(offered) == _MAX_OFFERED_KEYS:
                problems.append(f"more than {_MAX_OFFERED_KEYS} keys: name the right one with IdentityFile")
                break
            offered.append(label)
            start_s = time.monotonic()
            try:
                # An answer that lists further methods means "this key, and more": not supported.
                if not connection.auth_publickey(target.user, key):
                    return
                problems.append("the server wants a further login step")
            except paramiko.AuthenticationException:
                if (
                    time.monotonic() - start_s >= target.connect_timeout_s
                ):  # no answer, which the next key would not get
                    waited = f"{target.connect_timeout_s:g} s"
                    _fail(target, f"{target.login}: no answer to the login within {waited}", "is that server well?")
                continue
    except (paramiko.SSHException, OSError, EOFError) as error:
        problems.append(str(error) or "the connection was closed")
    finally:
        if agent is not None:
            agent.close()
    tried = ", ".join(offered) or "none found"
    notes = f" ({'; '.join(problems)})" if problems else ""
    _fail(
        target,
        f"{target.login} accepts none of our keys; tried: {tried}{notes}",
        f"install one with: ssh-copy-id -p {target.port} {target.user}@{target.address}",
    )


def _keys(target: SshTarget, agent: paramiko.Agent | None, problems: list[str]) -> Iterator[tuple[str, paramiko.PKey]]:
    """Yield (label, key): the agent's keys first, then the key files, as OpenSSH does."""
    import paramiko

    allowed = {_public_half(path) for path in map(str, target.key_files)} if target.identities_only else None
    seen: set[bytes] = set()
    for key in agent.get_keys() if agent is not None else ():
        if allowed is None or key.asbytes() in allowed:
            seen.add(key.asbytes())
            yield f"agent key {getattr(key, 'comment', '') or key.get_name()}", key
    for path in target.key_files:
        if not path.is_file():
            continue
        try:
            loaded = _load_key(path, path.stat().st_mtime_ns)
        except (paramiko.PasswordRequiredException, TypeError):
            # TypeError is what the crypto library raises for an encrypted PEM key without a password.
            if _public_half(str(path)) not in seen:
                problems.append(f"{path} needs a passphrase: load it with ssh-add {path}")
            continue
        except (paramiko.SSHException, OSError, ValueError) as error:
            problems.append(f"{path} cannot be read: {error}")
            continue
        if loaded.asbytes() not in seen:
            yield str(path), loaded


@functools.lru_cache
def _load_key(path: Path, _changed_ns: int) -> paramiko.PKey:
    """Read a private key, once for all hosts that take it."""
    import paramiko

    loaded: paramiko.PKey = paramiko.PKey.from_path(path)
    return loaded


def _public_half(path: str) -> bytes | None:
    """Return the public key blob that stands beside a private key file, None without one."""
    import base64
    import binascii

    try:
        with open(f"{path}.pub", encoding="utf-8") as stream:
            return base64.b64decode(stream.read().split()[1])
    except (OSError, IndexError, UnicodeDecodeError, binascii.Error):
        return None


def _fail(target: SshTarget, message: str, hint: str | None = None) -> NoReturn:
    if hint is not None:
        hint += f"{' Try' if hint.endswith('?') else '; then try'}: {target.ssh_command} true"
    raise TransportError(message, where=target.name, hint=hint) from None
