"""Read OpenSSH client configuration and say, for one host, how it is to be reached.

Honoured with paramiko: HostName, User, Port, IdentityFile, IdentitiesOnly, IdentityAgent, ProxyJump, ConnectTimeout,
UserKnownHostsFile, GlobalKnownHostsFile, HostKeyAlias, Include, Host and Match blocks. StrictHostKeyChecking is
honoured in the strict direction only: host keys are always checked. What only the system's `ssh` can do is listed in
`SshTarget.only_openssh`; `choice` decides with it.
"""

from __future__ import annotations

import functools
import getpass
import glob
import os
import re
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.base.errors import HostfileError, TransportError
from launcher.cluster.cluster import Host
from launcher.cluster.hostname import parse_address
from launcher.transport.ssh import library
from launcher.transport.ssh.known_hosts import DEFAULT_PORT, lookup_name
from launcher.transport.ssh.options import SshOptions

if TYPE_CHECKING:
    from paramiko import SSHConfig

DEFAULT_CONNECT_TIMEOUT_S = 10.0
USER_CONFIG = Path("~/.ssh/config")
SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")
_AGENT_VARIABLE = "SSH_AUTH_SOCK"
# Settings that need OpenSSH, and the values with which they do not.
_ONLY_OPENSSH = {
    "ProxyCommand": ("none",),
    "CertificateFile": ("none",),
    "PKCS11Provider": ("none",),
    "SecurityKeyProvider": ("none", "internal"),
    "HostbasedAuthentication": ("no",),
    "KnownHostsCommand": ("none",),
    "BindAddress": (),
    "BindInterface": (),
}
_DEFAULT_KEY_FILES = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
_MAX_INCLUDE_DEPTH = 16
_MAX_JUMPS = 8
_MATCH_EXEC = re.compile(r"^\s*match\b.*\bexec\b", re.IGNORECASE | re.MULTILINE)
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)\}")
_INCLUDE = re.compile(r"\s*include(?:\s*=\s*|\s+)(?P<patterns>.+?)\s*", re.IGNORECASE)


class NotUnderstoodError(TransportError):
    """A configuration that paramiko cannot read or apply; OpenSSH may."""


@dataclass(frozen=True)
class SshTarget:
    """Everything needed to connect to one host."""

    name: str  # as the user wrote it
    address: str  # what is connected to
    port: int
    user: str
    key_files: tuple[Path, ...]  # private keys, or public ones whose private half the agent holds
    identities_only: bool  # offer only keys of `key_files`, none of the agent's others
    agent_socket: str | None  # path of the SSH agent's socket
    known_hosts_files: tuple[Path, ...]
    host_key_name: str  # what known_hosts calls the host
    connect_timeout_s: float
    accept_new_host_keys: bool
    jumps: tuple[str, ...]  # "user@host:port" of each jump host, the first to connect to first
    only_openssh: tuple[str, ...] = ()  # names of settings for this host that paramiko does not know
    allows_gssapi: bool = False  # Kerberos may log in; many systems' own ssh_config says so for every host
    # What the OpenSSH command line needs, beside the configuration, to reach the same place.
    ssh_words: tuple[str, ...] = ()
    ssh_user: str = ""  # the user that the hostfile names

    @property
    def known_name(self) -> str:
        """What the lines of known_hosts are looked up by."""
        return self.host_key_name or lookup_name(self.address, self.port)

    @property
    def login(self) -> str:
        """`user@address port N`, for messages."""
        return f"{self.user}@{self.address} port {self.port}"

    @property
    def ssh_arguments(self) -> str:
        """The words behind `ssh` that reach the same place with OpenSSH, for remedies.

        The host is named as the user wrote it: what the configuration says about that name then holds there too.
        """
        place = f"{self.ssh_user}@{self.name}" if self.ssh_user else self.name
        return shlex.join((*self.ssh_words, place))

    @property
    def ssh_command(self) -> str:
        """The OpenSSH command that reaches the same place, for remedies."""
        return f"ssh {self.ssh_arguments}"

    @property
    def as_any_host(self) -> SshTarget:
        """This target with HOST for the host's own names: for what is said once of several hosts."""
        return replace(self, name="HOST", address="HOST")


class Targets:
    """How hosts are reached, by one configuration that is read once. Safe from several threads."""

    def __init__(self, options: SshOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._config: SSHConfig | None = None

    def of(self, host: Host) -> SshTarget:
        """Return how `host` is reached. Raises: TransportError."""
        with self._lock:
            if self._config is None:
                self._config = load_config(self._options)
            # SSHConfig.lookup keeps no state, but "Match exec" runs programs: one at a time.
            return resolve(host, self._config, self._options)

    def route(self, host: Host) -> list[SshTarget]:
        """Return the jump hosts before `host`, the first to connect to first, and `host` itself.

        Raises: TransportError.
        """
        return self._route(self.of(host), 0)

    def _route(self, target: SshTarget, depth: int) -> list[SshTarget]:
        if depth > _MAX_JUMPS:
            raise TransportError("too many jump hosts: does ProxyJump go in a circle?", where=target.name)
        jumps = [self._jump(text, target) for text in target.jumps]
        # Only the first jump host's own ProxyJump counts: the others are reached through the one before.
        return [*(self._route(jumps[0], depth + 1) if jumps else []), *jumps[1:], target]

    def _jump(self, text: str, target: SshTarget) -> SshTarget:
        try:
            address = parse_address(text.removeprefix("ssh://"))
        except HostfileError as error:
            raise TransportError(f"ProxyJump of the SSH config: {error}", where=target.name) from None
        return self.of(Host(address.names[0], (), address.user, address.port))


def load_config(options: SshOptions) -> SSHConfig:
    """Read the configuration files of `options`.

    Raises: TransportError when the named file is missing or a file is malformed.
    """
    reader = library.load().config
    if options.ssh_config is not None:
        text = _named_config(options.ssh_config)
    else:
        # "Host *" ends the last block of the user's file; the first value found wins, so the user's does.
        text = f"{_spliced(_user_config(), 0)}\nHost *\n{_spliced(SYSTEM_CONFIG, 0)}"
    if _MATCH_EXEC.search(text):
        library.with_exec()
    try:
        config: SSHConfig = reader.SSHConfig.from_text(text)
    except (reader.ConfigParseError, ValueError) as error:
        place = str(options.ssh_config or USER_CONFIG)
        raise NotUnderstoodError(f"SSH config cannot be read: {error}", where=place) from None
    return config


def resolve(host: Host, config: SSHConfig, options: SshOptions) -> SshTarget:
    """Combine hostfile, command line and configuration; the first of these that says something wins.

    Raises: TransportError for a value that cannot be used.
    """
    found = _lookup(host, config)
    address = found.get("hostname", host.name)
    port = host.port or options.ssh_port or _number(found.get("port", str(DEFAULT_PORT)), "Port", host)
    timeout_s = options.connect_timeout_s or float(_number(found.get("connecttimeout", "0"), "ConnectTimeout", host))
    user = host.user or found.get("user") or getpass.getuser()
    key_files = [_filled_in(file) for file in found.get("identityfile", [])]
    return SshTarget(
        name=host.name,
        address=address,
        port=port,
        user=user,
        key_files=tuple(Path(os.path.expanduser(f)) for f in key_files or _DEFAULT_KEY_FILES if f != "none"),
        identities_only=found.get("identitiesonly", "no").lower() == "yes",
        agent_socket=_agent_socket(found.get("identityagent", _AGENT_VARIABLE), host.name, address, user),
        known_hosts_files=_known_hosts_files(found, options),
        host_key_name=found.get("hostkeyalias", ""),
        connect_timeout_s=timeout_s or DEFAULT_CONNECT_TIMEOUT_S,
        accept_new_host_keys=options.accept_new_host_keys,
        jumps=_jumps(found.get("proxyjump", "none")),
        only_openssh=tuple(_only_openssh(found)),
        allows_gssapi=found.get("gssapiauthentication", "no").lower() == "yes",
        ssh_words=tuple(options.openssh_words(host)),
        ssh_user=host.user or "",
    )


def _only_openssh(found: dict[str, Any]) -> Iterator[str]:
    """Yield the settings that need OpenSSH."""
    for name, harmless in _ONLY_OPENSSH.items():
        value = found.get(name.lower())
        if value is not None and value.lower() not in harmless:  # paramiko gives None for a ProxyCommand "none"
            yield name
    if found.get("preferredauthentications", "").lower().startswith("gssapi"):
        yield "PreferredAuthentications"
    if _has_open_master(found.get("controlpath", "none")):
        yield "ControlPath"


def _has_open_master(control_path: str) -> bool:
    """Whether a connection may be open that `ssh` would share: one whose socket fits ControlPath, for any host."""
    if control_path.lower() == "none":
        return False
    # "%C" is a digest that differs between versions of OpenSSH: any socket will do, `ssh` looks for the right one.
    pattern = re.sub(r"%.", "*", glob.escape(os.path.expanduser(_filled_in(control_path))))
    return any(Path(path).is_socket() for path in glob.iglob(pattern))


def _user_config() -> Path:
    return Path(os.path.expanduser(USER_CONFIG))  # a user without a home has a path that leads nowhere, and no error


def _lookup(host: Host, config: SSHConfig) -> dict[str, Any]:
    reader = library.load().config
    try:
        return dict(config.lookup(host.name))
    except (reader.ConfigParseError, reader.CouldNotCanonicalize, ImportError, ValueError, KeyError) as error:
        # ImportError: "Match exec" needs a package that is not installed.
        raise NotUnderstoodError(f"SSH config cannot be applied: {error}", where=host.name) from None


def _agent_socket(value: str, name: str, address: str, user: str) -> str | None:
    """Return the socket that IdentityAgent names (see ssh_config(5)); None for none."""
    value = value.strip('"')
    if value.lower() == "none":
        return None
    if value == _AGENT_VARIABLE or value.startswith("$"):
        variable = _VARIABLE.fullmatch(value)
        value = os.environ.get(variable["name"] if variable else value.removeprefix("$"), "")
        return value or None
    tokens = {"%": "%", "d": os.path.expanduser("~"), "h": address, "n": name, "r": user, "u": _local_user()}
    filled = re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), _filled_in(value))
    return os.path.expanduser(filled)


def _local_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name
        return str(os.getuid())


def _filled_in(value: str) -> str:
    """Return `value` with ${NAME} replaced by the variables of this process; unknown ones stay."""
    return _VARIABLE.sub(lambda match: os.environ.get(match["name"], match[0]), value)


def _known_hosts_files(found: dict[str, Any], options: SshOptions) -> tuple[Path, ...]:
    if options.known_hosts is not None:
        return (options.known_hosts,)
    own = _words(found.get("userknownhostsfile", _USER_KNOWN_HOSTS))
    names = own + _words(found.get("globalknownhostsfile", _GLOBAL_KNOWN_HOSTS))
    return tuple(Path(os.path.expanduser(name)) for name in names if name.lower() != "none")


def _jumps(value: str) -> tuple[str, ...]:
    return () if value.lower() == "none" else tuple(jump.strip() for jump in value.split(","))


def _number(text: str, key: str, host: Host) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise TransportError(f'{key} of the SSH config is "{text}", not a number', where=host.name)
    return int(text)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an unbalanced quote
        return text.split()


def _named_config(path: Path) -> str:
    """Return the text of the file that the command line names. Raises: TransportError."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else _read_once(path)
    except OSError as error:
        what = "not found" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise TransportError(f"SSH config file {what}", where=str(path), hint="check the path behind -F") from None
    return _with_includes(text, path, 0)


@functools.lru_cache(maxsize=8)
def _read_once(path: Path) -> str:
    """Read what is not a regular file: a pipe (`-F <(...)`) gives its text only once. Raises: OSError."""
    return path.read_text(encoding="utf-8", errors="replace")


def _spliced(path: Path, depth: int) -> str:
    """Return the text of `path` with Include lines replaced by what they name; "" when unreadable."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return _with_includes(text, path, depth)


def _with_includes(text: str, path: Path, depth: int) -> str:
    lines: list[str] = []
    for line in text.splitlines():
        match = _INCLUDE.fullmatch(line)
        if match is None:
            lines.append(line)
        elif depth < _MAX_INCLUDE_DEPTH:
            base = path.parent if path == SYSTEM_CONFIG else _user_config().parent
            for pattern in _words(match["patterns"]):
                for name in sorted(glob.glob(str(base / os.path.expanduser(pattern)))):
                    lines.append(_spliced(Path(name), depth + 1))
    return "\n".join(lines)
