"""Which keys are offered to a server, and in which order: as OpenSSH does (sshconnect2.c, pubkey_prepare).

First the keys of the configuration that the agent holds, then the agent's others unless IdentitiesOnly is set, then
the key files, each with the certificate beside it. Unlike OpenSSH, keys that no longer fit into the server's number of
tries are offered on a further connection, see `connect`.
"""

from __future__ import annotations

import base64
import binascii
import functools
import os
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paramiko
from paramiko.agent import AgentSSH

if TYPE_CHECKING:
    from launcher.transport.ssh.config import SshTarget

_PRIVATE_MAGIC = b"openssh-key-v1\0"
_PUBLIC_TYPES = ("ssh-", "ecdsa-", "sk-")
_MAX_KEY_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class Offer:
    """One key to try."""

    label: str  # for messages
    key: paramiko.PKey


class SshAgent(AgentSSH):
    """The agent at one socket; `paramiko.Agent` knows SSH_AUTH_SOCK only."""

    if TYPE_CHECKING:  # what paramiko's type stubs leave out
        _connect: Callable[[socket.socket], None]
        _close: Callable[[], None]

    def __init__(self, path: str | None, timeout_s: float) -> None:
        """Ask the agent for its keys; one that does not answer holds none. Raises: paramiko.SSHException.

        timeout_s: for each answer. A forwarded agent whose connection is dead takes requests and never answers.
        """
        super().__init__()
        self.has_answered = True
        if path is None:
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
            self._connect(connection)
        except (OSError, paramiko.SSHException) as error:
            connection.close()
            if isinstance(error, paramiko.SSHException) and self.has_answered:
                raise
            # Its process is gone, as OpenSSH finds too, or hangs.
            self.has_answered = self.has_answered and not isinstance(error, TimeoutError)

    def _send_message(self, msg: Any) -> Any:
        """Ask the agent. Raises: paramiko.SSHException, OSError."""
        try:
            return super()._send_message(msg)  # type: ignore[misc]  # the stubs leave it out
        except TimeoutError:  # the thread of a connection, which asks for signatures, cannot report this one
            self.has_answered = False
            raise paramiko.SSHException("the key agent gives no answer") from None

    def close(self) -> None:
        """Leave the agent."""
        self._close()


def offers(target: SshTarget, agent: SshAgent, problems: list[str]) -> Iterator[Offer]:
    """Yield the keys to offer to `target`; what keeps a key from being offered is added to `problems`."""
    named: dict[bytes, Path] = {}
    for path in target.key_files:
        certificate = _certificate_of(path)
        named |= {blob: file for file in (path, certificate) if (blob := public_half(file)) is not None}
    held = [(key.asbytes(), key) for key in agent.get_keys()]
    in_agent = {blob for blob, _ in held}
    for blob, key in held:
        if blob in named:
            yield Offer(f"{named[blob]} (agent)", key)
            certificate = _certificate_of(named[blob])
            if certificate.is_file() and public_half(certificate) not in in_agent:
                yield from _certified(key, certificate, problems)
    if not target.identities_only:
        for blob, key in held:
            if blob not in named:
                yield Offer(f"agent key {getattr(key, 'comment', '') or key.get_name()}", key)
    for path in target.key_files:
        if path.is_file() and public_half(path) not in in_agent:
            yield from _of_file(path, problems)


def _certificate_of(path: Path) -> Path:
    return Path(f"{str(path).removesuffix('.pub')}-cert.pub")


def _certified(key: paramiko.PKey, certificate: Path, problems: list[str]) -> Iterator[Offer]:
    """Yield `key`, which no other thread may use meanwhile, together with the certificate of a file."""
    try:
        key.load_certificate(str(certificate))
    except (paramiko.SSHException, OSError, ValueError) as error:
        problems.append(f"{certificate} cannot be used: {error}")
        return
    yield Offer(str(certificate), key)


def public_half(path: Path) -> bytes | None:
    """Return the public key of a key file: from the file itself, or from the .pub file beside it; None: not known."""
    for file in (path, Path(f"{path}.pub")):
        blob = _public_blob(file)
        if blob is not None:
            return blob
    return _public_part(path)


def _of_file(path: Path, problems: list[str]) -> Iterator[Offer]:
    found = path.stat()
    if _public_blob(path) is not None:
        problems.append(f"{path} is a public key, and the agent does not hold its private one: load it with ssh-add")
        return
    if found.st_uid == os.getuid() and found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(found.st_mode)
        problems.append(f"{path} is ignored, as others may read it (mode {mode:04o}): chmod 600 {path}")
        return
    try:
        key = _load_key(path, found.st_mtime_ns)
    except (paramiko.PasswordRequiredException, TypeError):
        # TypeError is what the crypto library raises for an encrypted PEM key without a password.
        problems.append(f"{path} needs a passphrase: load it with ssh-add {path}")
        return
    except (paramiko.SSHException, OSError, ValueError) as error:
        problems.append(f"{path} cannot be read: {error}")
        return
    yield Offer(str(path), key)
    certificate = _certificate_of(path)
    if certificate.is_file():
        yield from _certified(paramiko.PKey.from_path(path), certificate, problems)


@functools.lru_cache
def _load_key(path: Path, _changed_ns: int) -> paramiko.PKey:
    """Read a private key, once for all hosts that take it.

    Raises: paramiko.SSHException, OSError, ValueError, TypeError.
    """
    loaded: paramiko.PKey = paramiko.PKey.from_path(path)
    loaded.public_blob = None  # the certificate beside it is offered apart
    return loaded


def _public_blob(path: Path) -> bytes | None:
    """Return the key that a public key file holds, None when it is not such a file."""
    try:
        words = _text(path).split()
        return base64.b64decode(words[1]) if words[0].startswith(_PUBLIC_TYPES) else None
    except (OSError, IndexError, UnicodeDecodeError, binascii.Error):
        return None


def _public_part(path: Path) -> bytes | None:
    """Return the public key that stands, unencrypted, in a private key file of OpenSSH's own format."""
    try:
        lines = _text(path).split("\n")
        data = base64.b64decode("".join(line for line in lines if not line.startswith("-----")))
    except (OSError, UnicodeDecodeError, binascii.Error):
        return None
    if not data.startswith(_PRIVATE_MAGIC):
        return None
    message = paramiko.Message(data[len(_PRIVATE_MAGIC) :])
    for _ in ("cipher", "key derivation", "its options"):
        message.get_binary()
    message.get_int()  # number of keys
    return message.get_binary() or None


def _text(path: Path) -> str:
    with path.open(encoding="ascii") as stream:
        return stream.read(_MAX_KEY_FILE_BYTES)
