"""Make one authenticated SSH connection, or say exactly why not and what to do.

Order: TCP (or a channel through a jump host), key exchange, host key check, public key login. The host key is
checked before any key is offered. A new host's key is recorded only where the user asked for that, a changed one never
accepted.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from launcher.base.errors import Diagnostic, TransportError
from launcher.base.fields import named
from launcher.transport.ssh import library
from launcher.transport.ssh.config import ALGORITHMS, SshTarget
from launcher.transport.ssh.known_hosts import (
    HostKeyFinding,
    KnownKey,
    Verdict,
    check_key,
    find_keys,
    record_new_key,
)

if TYPE_CHECKING:
    import paramiko

    from launcher.transport.ssh.keys import Offer

_OTHER_NAMES = {"curve25519-sha256": "curve25519-sha256@libssh.org"}  # of algorithms: what paramiko calls them
_Address = tuple[socket.AddressFamily, Any]  # of an address its form depends on the family
_KEEPALIVE_S = 15
_IDLE_CHECK_S = 5.0
_GOODBYE_S = 1.0
_TCP_USER_TIMEOUT_MS = 30_000  # unacknowledged data this old ends the connection: a node crashed or is cut off
# sshd hangs up after some refused keys (MaxAuthTries, 6): a wrong key must not use up the tries of the right one.
_MAX_LOGINS = 4
_MAX_OFFERED_KEYS = 20  # on all of these connections
_TRY, _OR_TRY = "try: {t.ssh_command} true", "Try: {t.ssh_command} true"
_ASK_ABOUT_SERVER = (
    "is it an sshd that listens there, and does it have room for one more connection (MaxStartups)? " + _OR_TRY
)


def connect(target: SshTarget, open_channel: Callable[[], paramiko.Channel] | None) -> paramiko.Transport:
    """Connect and log in to `target`.

    open_channel: opens a way through a jump host, for a target behind one; called for each connection that is tried.
    Raises: TransportError naming host, user, port and remedy.
    """
    tries = _Tries(target)
    try:
        for _ in range(_MAX_LOGINS):
            connection = _connect_once(target, open_channel, tries)
            if connection is not None:
                return connection
    finally:
        tries.close()
    tries.give_up()


def _connect_once(
    target: SshTarget, open_channel: Callable[[], paramiko.Channel] | None, tries: _Tries
) -> paramiko.Transport | None:
    """Return a connection that is logged in; None when the server hung up on our keys, and more are left."""
    sock = _tcp(target) if open_channel is None else open_channel()
    known = find_keys(target.known_name, target.known_hosts_files)
    connection = _start(target, sock, known)
    try:
        _verify(target, connection, known)
        if not tries.log_in(connection):
            connection.close()
            return None
        connection.set_keepalive(_KEEPALIVE_S)
        # paramiko's thread looks up from its socket ten times a second, which for 250 idle connections is a tenth of a
        # core. Nothing it looks for is urgent; `end_connections` wakes it.
        connection.sock.settimeout(_IDLE_CHECK_S)
    except BaseException:  # Ctrl-C included: the connection's thread must not live on
        connection.close()
        raise
    return connection


def end_connections(connections: Iterable[paramiko.Transport]) -> None:
    """Close connections that `connect` made. Their threads are woken first: they may wait on the descriptors.

    They still say goodbye then, which has to go through a jump host: that connection may be closed after this returns.
    """
    woken = list(connections)
    for connection in woken:  # all of them before the first is waited for
        with contextlib.suppress(OSError, EOFError):
            connection.sock.shutdown(socket.SHUT_RDWR)
    for connection in woken:
        connection.close()
        connection.join(_GOODBYE_S)


def open_jump(connection: paramiko.Transport, jump: SshTarget, target: SshTarget) -> paramiko.Channel:
    """Open a TCP channel from the jump host to `target`. Raises: TransportError."""
    from paramiko import SSHException

    try:
        return connection.open_channel(
            "direct-tcpip", (target.address, target.port), ("127.0.0.1", 0), timeout=target.connect_timeout_s
        )
    except (SSHException, OSError, EOFError) as error:
        problem = "jump host {jump} cannot reach {t.address} port {t.port}: {reason}"
        _fail(target, problem, _TRY, jump=jump.login, reason=library.cause_of(error))


def _tcp(target: SshTarget) -> socket.socket:
    try:
        addresses = _resolved(target)
    except (socket.gaierror, UnicodeError):
        hint = f"check its spelling, or give it a HostName in ~/.ssh/config; then {_TRY}"
        _fail(target, 'host name "{t.address}" cannot be resolved', hint)
    try:
        sock = _first_connected(addresses, target.connect_timeout_s)
    except TimeoutError:
        problem = "no answer from {t.login} within {t.connect_timeout_s:g} s"
        _fail(target, problem, f"is the host up, and the port open? {_OR_TRY}")
    except ConnectionRefusedError:
        _fail(target, "connection refused by {t.login}", f"is sshd running there, on this port? {_OR_TRY}")
    except OSError as error:
        problem = "{t.login} cannot be reached: {reason}"
        _fail(target, problem, f"is the network up? {_OR_TRY}", reason=error.strerror or error)
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
    return sock


def _resolved(target: SshTarget) -> list[_Address]:
    """Return the addresses of a target. Raises: socket.gaierror, UnicodeError, TransportError."""
    # The C library's own limit is 30 s and more, and nothing ends its wait: a thread of its own is left to it.
    answer: queue.SimpleQueue[list[_Address] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(target.address, target.port, target.family, socket.SOCK_STREAM)
            answer.put([(one[0], one[4]) for one in found])
        except (OSError, UnicodeError) as error:
            answer.put(error)

    threading.Thread(target=ask, name="resolve", daemon=True).start()
    try:
        addresses = answer.get(timeout=target.connect_timeout_s)
    except queue.Empty:
        problem = 'no name server has answered for "{t.address}" within {t.connect_timeout_s:g} s'
        _fail(target, problem, f"is the network up? {_OR_TRY}")
    if isinstance(addresses, Exception):
        raise addresses
    return addresses


def _first_connected(addresses: Sequence[_Address], timeout_s: float) -> socket.socket:
    """Return a socket to the first of `addresses` that answers; they share the time fairly. Raises: OSError."""
    deadline_s = time.monotonic() + timeout_s
    error: OSError = TimeoutError()
    for index, (family, address) in enumerate(addresses):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.01, (deadline_s - time.monotonic()) / (len(addresses) - index)))
            sock.connect(address)
        except OSError as caught:
            sock.close()
            error = caught
        else:
            return sock
    raise error


def _start(target: SshTarget, sock: socket.socket | paramiko.Channel, known: list[KnownKey]) -> paramiko.Transport:
    """Exchange keys with the server.

    Algorithms of keys already known are preferred, as OpenSSH does: a server with several host keys
    must be asked for one that can be compared.
    """
    import paramiko

    connection = paramiko.Transport(sock)
    connection.banner_timeout = connection.auth_timeout = connection.handshake_timeout = target.connect_timeout_s
    known_types = {key.key_type for key in known if not key.is_authority}
    security, ours = connection.get_security_options(), usable(target)
    if not all(ours.values()):
        unusable = next(name for name, names in ours.items() if not names)
        connection.close()
        _fail(
            target, f"none of {unusable} of the SSH config is known to paramiko", f"leave out {named('ssh')} paramiko"
        )
    security.kex, security.digests = ours["KexAlgorithms"], ours["MACs"]
    # First those that check a packet themselves: paramiko compares digests byte by byte, in Python.
    security.ciphers = sorted(ours["Ciphers"], key=lambda name: "-gcm@" not in name)
    security.key_types = sorted(ours["HostKeyAlgorithms"], key=lambda name: _base_type(name) not in known_types)
    done, start_s = threading.Event(), time.monotonic()
    connection.start_client(done)
    finished = done.wait(target.connect_timeout_s)
    error = connection.get_exception()
    if finished and error is None and connection.is_active():
        return connection
    connection.close()
    if not finished or time.monotonic() - start_s > 0.9 * target.connect_timeout_s:
        _fail(target, "{t.login}: no SSH answer within {t.connect_timeout_s:g} s", _ASK_ABOUT_SERVER)
    # An sshd with many logins under way drops some of them at random (MaxStartups): the next try may get through.
    problem = "{t.login}: SSH negotiation failed: {reason}"
    _fail(target, problem, _ASK_ABOUT_SERVER, DroppedError, reason=library.cause_of(error))


def usable(target: SshTarget) -> dict[str, tuple[str, ...]]:
    """Return, for each setting about algorithms, those that the SSH config allows and paramiko has, in that order."""
    found = {}
    for setting, known in zip(ALGORITHMS, _algorithms(), strict=True):
        allowed = (_OTHER_NAMES.get(name, name) for name in target.algorithms.get(setting, known))
        found[setting] = tuple(name for name in dict.fromkeys(allowed) if name in known)
    return found


@functools.lru_cache(maxsize=1)
def _algorithms() -> tuple[Sequence[str], ...]:
    """Return what paramiko has, for each of ALGORITHMS."""
    paramiko = library.load()
    ours, theirs = socket.socketpair()
    connection = paramiko.Transport(ours)
    security = connection.get_security_options()
    found = (security.kex, security.ciphers, security.digests, security.key_types)
    ours.close()
    theirs.close()
    return found


class DroppedError(TransportError):
    """The server dropped the connection before the login; worth another try."""


def _base_type(name: str) -> str:
    """Return the known_hosts type of a host key algorithm: RSA keys are listed as ssh-rsa for any hash."""
    return "ssh-rsa" if name.startswith("rsa-sha2-") else name


def _verify(target: SshTarget, connection: paramiko.Transport, known: list[KnownKey]) -> None:
    key = connection.get_remote_server_key()
    finding = check_key(known, key.asbytes())
    if finding.verdict is Verdict.UNKNOWN and target.accept_new_host_keys and target.known_hosts_files:
        own = target.known_hosts_files[0]
        try:
            finding = record_new_key(target.known_hosts_files, target.known_name, key.get_name(), key.asbytes())
        except OSError as error:
            hint = "make the file writable, or name another with UserKnownHostsFile of the SSH config"
            _fail(target, "the host key cannot be recorded in {own}: {reason}", hint, own=own, reason=error.strerror)
    if finding.verdict is not Verdict.KNOWN:
        _refuse(target, finding, f"{key.get_name()} {key.fingerprint}")


def _refuse(target: SshTarget, finding: HostKeyFinding, shown: str) -> NoReturn:
    """Say why a host key is not accepted. shown: its type and fingerprint."""
    known, problem = finding.key, "host key of {t.login} is not known"
    record = f"let launch record the keys of new hosts with {named('accept_new_host_keys')}"
    if known is None:
        accept = "compare the fingerprint and accept the key with: {t.ssh_command} true"
        # Of several hosts no single key can be shown.
        _fail(target, problem, f"{accept}; or, on a network you trust, {record}", only_here=f" ({shown})")
    if finding.verdict is Verdict.UNKNOWN:  # OpenSSH is content with the certificate and records nothing
        problem += f": {{authority}} trusts an authority, but host certificates need {named('ssh')} openssh"
        _fail(target, problem, f"on a network you trust, {record}", authority=f"{known.file}:{known.line}")
    place = f"{known.file}:{known.line}"
    if finding.verdict is Verdict.REVOKED:
        raise TransportError(f"host key of {target.login} is revoked ({shown})", where=place)
    forget = f"ssh-keygen -f {shlex.quote(str(known.file))} -R {shlex.quote(target.known_name)}"
    raise TransportError(
        f"host key of {target.login} has changed: the server shows {shown}, {place} has another",
        where=target.name,
        hint=f"this may be a man-in-the-middle attack; ask who runs the host, then forget the old key with: {forget}",
    )


class _Tries:
    """The keys to offer to one host, over as many connections as that takes."""

    def __init__(self, target: SshTarget) -> None:
        self.problems: list[str] = []
        self.offered: list[str] = []
        self._target = target
        self._left: Iterator[Offer] | None = None
        self._next: Offer | None = None
        self._close_agent: Callable[[], None] = lambda: None

    def close(self) -> None:
        """Leave the SSH agent."""
        self._close_agent()

    def log_in(self, connection: paramiko.Transport) -> bool:
        """Offer the keys that are left; False when the server hangs up before the last of them.

        Raises: TransportError when none is accepted.
        """
        from paramiko import AuthenticationException, BadAuthenticationType, SSHException

        is_key_wanted = True
        try:
            while (offer := self._take()) is not None:
                if len(self.offered) == _MAX_OFFERED_KEYS:
                    self.give_up()
                self.offered.append(offer.label)
                start_s = time.monotonic()
                try:
                    # An answer that lists further methods means "this key, and more": not supported.
                    if not connection.auth_publickey(self._target.user, offer.key):
                        return True
                    self.problems.append("the server wants a further login step")
                except BadAuthenticationType as error:
                    is_key_wanted = False
                    self.problems.append(f"the server takes no keys, only: {', '.join(error.allowed_types)}")
                    break
                except AuthenticationException:
                    if time.monotonic() - start_s >= self._target.connect_timeout_s:
                        self._no_answer(offer.label)
                    if not connection.is_active():
                        self._next = self._take()
                        if self._next is not None:
                            return False
                        self.problems.append(library.cause_of(None))
        except (SSHException, OSError, EOFError) as error:
            self.problems.append(library.cause_of(error))
        self._name_other_logins(is_key_wanted)
        self.fail()

    def _no_answer(self, label: str) -> NoReturn:
        """Say that the server, or the agent that was to sign, was silent. Raises: TransportError.

        The next key would get no answer either.
        """
        problem = "{t.login}: no answer to the login within {t.connect_timeout_s:g} s"
        question = f"does the key agent sign with {label}, or " if "agent" in label else ""
        _fail(self._target, problem, f"{question}is that server overloaded? {_OR_TRY}")

    def give_up(self) -> NoReturn:
        """Say that there are too many keys. Raises: TransportError."""
        self.problems.append("there are more: name the right one with IdentityFile, and set IdentitiesOnly yes")
        self.fail()

    def fail(self) -> NoReturn:
        """Say which keys were tried, and what to do. Raises: TransportError."""
        tried = ", ".join(self.offered) or "none found"
        notes = f" ({'; '.join(self.problems)})" if self.problems else ""
        hint = f"install one with: ssh-copy-id {{t.ssh_arguments}}; then {_TRY}"
        _fail(self._target, "{t.login} accepts none of our keys; tried: {tried}{notes}", hint, tried=tried, notes=notes)

    def _take(self) -> Offer | None:
        """Return the next key. Raises: paramiko.SSHException for an agent that speaks another protocol."""
        if self._left is None:
            from launcher.transport.ssh.keys import SshAgent, offers

            target = self._target
            agent = SshAgent(target.agent_socket, target.connect_timeout_s)
            self._close_agent = agent.close
            if not agent.has_answered:
                self.problems.append(
                    f"the key agent at {target.agent_socket} gave no answer within {target.connect_timeout_s:g} s"
                )
            self._left = offers(self._target, agent, self.problems)
        offer, self._next = self._next, None
        return offer or next(self._left, None)

    def _name_other_logins(self, is_key_wanted: bool) -> None:
        # Debian's own ssh_config has GSSAPIAuthentication: worth a word only where keys were out of the question.
        are_keys_refused = is_key_wanted and bool(self.offered)
        names = [*self._target.only_openssh]
        if self._target.allows_gssapi and not are_keys_refused:
            names.append("GSSAPIAuthentication")
        self.problems += [f"{name} of the SSH config needs {named('ssh')} openssh" for name in names]


def _fail(
    target: SshTarget,
    problem: str,
    hint: str,
    kind: type[TransportError] = TransportError,
    *,
    only_here: str = "",
    **values: object,
) -> NoReturn:
    """Raise what `problem` and `hint` say of a target, and what they say of several hosts that share the trouble.

    Both are templates: {t} is the target, other names are `values`. only_here: said of a single host behind `problem`.
    """
    said, shared = ((problem.format(t=t, **values), hint.format(t=t, **values)) for t in (target, target.as_any_host))
    raise kind.from_diagnostics([Diagnostic(said[0] + only_here, target.name, said[1], shared)]) from None
