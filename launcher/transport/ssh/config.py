"""For one host: how it is to be reached, as `ssh -G` of this machine says.

OpenSSH reads its own configuration, so that no Include, Match, token or quote means something else here. Honoured with
paramiko: HostName, User, Port, AddressFamily, IdentityFile, IdentitiesOnly, IdentityAgent, ProxyJump, ConnectTimeout,
UserKnownHostsFile, GlobalKnownHostsFile, HostKeyAlias, Ciphers, MACs, KexAlgorithms, HostKeyAlgorithms.
StrictHostKeyChecking is honoured in the strict direction only: host keys are always checked. What only the system's
`ssh` can do is listed in `SshTarget.only_openssh`; `choice` decides with it.
"""

from __future__ import annotations

import functools
import os
import pwd
import re
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from launcher.base.errors import HostfileError, TransportError
from launcher.base.fields import named
from launcher.base.signals import child_groups
from launcher.base.timeouts import timeouts
from launcher.cluster.cluster import Host
from launcher.cluster.nodeset import parse_address
from launcher.transport.ssh.known_hosts import DEFAULT_PORT, lookup_name
from launcher.transport.ssh.options import SshOptions

_USER_CONFIG = "~/.ssh/config"
_SYSTEM_CONFIG = "/etc/ssh/ssh_config"
_AGENT_VARIABLE = "SSH_AUTH_SOCK"
# Settings that need OpenSSH, and the values with which they do not.
_ONLY_OPENSSH = {
    "ProxyCommand": ("none",),
    "CertificateFile": ("none",),
    "PKCS11Provider": ("none",),
    "SecurityKeyProvider": ("none", "internal"),
    "HostbasedAuthentication": ("no",),
    "KnownHostsCommand": ("none",),
    "RevokedHostKeys": ("none",),
    "BindAddress": (),
    "BindInterface": (),
}
ALGORITHMS = ("KexAlgorithms", "Ciphers", "MACs", "HostKeyAlgorithms")  # settings that name some
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
_DEFAULT_KEY_FILES = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_USER_KNOWN_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_GLOBAL_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"
_MAX_JUMPS = 8
# An `ssh -G` is 4 ms of a processor outside of this process, a second for 250 hosts: see `Targets.ask_for`.
_NUM_ASKING = 8
# Names that `ssh -G` prints as they were given: it spells others in lower case, or as an address of another form.
_UNCHANGED = re.compile(r"[a-z][a-z0-9.-]*|([1-9]\d{0,2}|0)(\.([1-9]\d{0,2}|0)){3}")
_LINE = re.compile(r"\s*(?P<keyword>\w+)(?:\s*=\s*|\s+)(?P<value>.*)")
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)\}")

Answer = Mapping[str, Sequence[str]]  # of `ssh -G`: lower-case keyword -> its values


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
    only_openssh: tuple[str, ...]  # names of settings for this host that paramiko does not know
    allows_gssapi: bool  # Kerberos may log in; many systems' own ssh_config says so for every host
    algorithms: Mapping[str, Sequence[str]]  # setting -> what it allows, the preferred first; what is not in it is free
    family: int
    # What the OpenSSH command line needs, beside the configuration, to reach the same place.
    ssh_words: tuple[str, ...]
    ssh_user: str  # the user that the hostfile names; "": none

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
        """This target with HOST for the host's own names: for a message about several hosts."""
        return replace(self, name="HOST", address="HOST")


class Targets:
    """How hosts are reached, asked once for each of them. Safe from several threads."""

    def __init__(self, options: SshOptions) -> None:
        self._options = options
        self._known: dict[tuple[str, str | None, int | None], SshTarget | TransportError] = {}
        # By a group of hosts that the configuration does not tell apart: the one that was asked for, and its answer.
        self._shared: dict[tuple[Any, ...], tuple[str, Answer]] = {}
        self._host_lines: list[list[str]] | None = None  # of the configuration; None: each host is asked for

    def of(self, host: Host) -> SshTarget:
        """Return how `host` is reached. Raises: TransportError."""
        key = (host.name, host.user, host.port)
        if key not in self._known:  # two threads that ask for one host at the same time learn the same
            try:
                self._known[key] = _target(host, self._options, self._answer_of)
            except TransportError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, TransportError):
            raise TransportError.from_diagnostics(found.diagnostics)
        return found

    def ask_for(self, hosts: Sequence[Host]) -> None:
        """Learn how all of `hosts` are reached, several at a time. Their errors are left to `route` and `of`.

        Hosts that the same Host lines of the configuration match have one answer, up to their own name.
        """
        self._host_lines = _host_lines(self._options) if len(hosts) > 1 else None
        firsts = {self._group_of(host): host for host in hosts}
        self._ask_at_once(list(firsts.values()))
        self._ask_at_once(list(hosts))

    def _ask_at_once(self, left: list[Host]) -> None:

        def ask() -> None:
            while left:
                try:
                    self.route(left.pop())
                except (TransportError, IndexError):  # IndexError: another thread took the last one
                    continue

        # Daemons: a program of `Match exec` that does not end must not hold up the end of this process.
        threads = [threading.Thread(target=ask, daemon=True) for _ in range(min(_NUM_ASKING, len(left)))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            left.clear()  # at Ctrl-C: what they ask now ends with this process, and they ask no more

    def _group_of(self, host: Host) -> tuple[Any, ...]:
        if self._host_lines is None or not _UNCHANGED.fullmatch(host.name):
            return (host.name, host.user, host.port)
        return (host.user, host.port, *(_is_matched(host.name, patterns) for patterns in self._host_lines))

    def _answer_of(self, host: Host) -> Answer:
        """Return what `ssh -G` says of a host. Raises: TransportError."""
        group = self._group_of(host)
        if group not in self._shared:
            self._shared[group] = host.name, _ask_ssh(host, self._options)
        name, answer = self._shared[group]
        if name == host.name:
            return answer
        its_own = {key for key, values in answer.items() if any(name in value for value in values)}
        if its_own <= {"host", "hostname"} and answer.get("hostname", [name]) == [name]:
            return {**answer, "host": [host.name], "hostname": [host.name]}
        return _ask_ssh(host, self._options)

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
        text = re.sub(r"\[([\d.]+)\]", r"\1", text)  # `ssh -G` puts brackets around IPv4 addresses
        try:
            address = parse_address(text.removeprefix("ssh://"))
        except HostfileError as error:
            raise TransportError(f"ProxyJump of the SSH config: {error}", where=target.name) from None
        return self.of(Host(address.names[0], (), address.user, address.port))


def run_briefly(argv: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program that asks nothing to its end; what it has started ends with it when it takes too long.

    All of it ends with this process, too.

    Raises: OSError, subprocess.TimeoutExpired.
    """
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
        errors="surrogateescape",
    ) as process:
        group = os.getpid(), process.pid
        child_groups.add(group)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:  # Ctrl-C included
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the number is no other group's
            raise
        finally:
            child_groups.discard(group)
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def _target(host: Host, options: SshOptions, answer_of: Callable[[Host], Answer]) -> SshTarget:
    """Return how a host is reached; hostfile and command line win over the configuration. Raises: TransportError."""
    try:
        me = pwd.getpwuid(os.getuid())
    except KeyError:  # `ssh` says the same
        raise TransportError(f"No user exists for uid {os.getuid()}", where=host.name) from None
    answer = answer_of(host) if _has_config(options, me) else {}

    def one(key: str, default: str = "") -> str:
        return answer.get(key, (default,))[0]

    address, user = one("hostname", host.name), one("user", host.user or me.pw_name)
    port = int(one("port", str(host.port or options.ssh_port or DEFAULT_PORT)))
    alias, timeout = one("hostkeyalias"), one("connecttimeout")
    this_host = socket.gethostname()
    tokens = {"%": "%", "d": me.pw_dir, "h": address, "i": str(me.pw_uid), "k": alias or host.name, "l": this_host}
    tokens |= {"L": this_host.partition(".")[0], "n": host.name, "p": str(port), "r": user, "u": me.pw_name}
    names = answer.get("identityfile", _DEFAULT_KEY_FILES)
    key_files = [_filled_in(name, tokens) for name in names if name.lower() != "none"]
    agent = one("identityagent", _AGENT_VARIABLE)
    if agent == _AGENT_VARIABLE or agent.startswith("$"):
        agent = os.environ.get(agent.removeprefix("$"), "")
    return SshTarget(
        name=host.name,
        address=address,
        port=port,
        user=user,
        key_files=tuple(map(Path, key_files)),
        identities_only=one("identitiesonly") == "yes",
        agent_socket=None if agent.lower() in ("", "none") else agent,
        known_hosts_files=_known_hosts_files(one, options, tokens),
        host_key_name=alias,
        # "none", which is what `ssh -G` says where nothing is set, would have a job wait without end.
        connect_timeout_s=options.connect_timeout_s
        or float(timeout if timeout.isdigit() else 0)
        or timeouts().connect_s,
        accept_new_host_keys=options.accept_new_host_keys,
        jumps=tuple(jump for jump in one("proxyjump").split(",") if jump not in ("", "none")),
        only_openssh=tuple(_only_openssh(one, key_files)),
        allows_gssapi=one("gssapiauthentication") == "yes",
        algorithms={name: names.split(",") for name in ALGORITHMS if (names := one(name.lower()))},
        family=_FAMILIES.get(one("addressfamily"), socket.AF_UNSPEC),
        ssh_words=tuple(options.openssh_words(host)),
        ssh_user=host.user or "",
    )


def _has_config(options: SshOptions, me: pwd.struct_passwd) -> bool:
    """Whether there is any configuration: without one `ssh` need not be asked, nor be there."""
    if options.ssh_config is not None:
        return str(options.ssh_config) != "none"
    return any(map(os.path.exists, (_USER_CONFIG.replace("~", me.pw_dir, 1), _SYSTEM_CONFIG)))


def _ask_ssh(host: Host, options: SshOptions) -> Answer:
    """Return what the configuration says of a host: what differs from `ssh` without one. Raises: TransportError.

    A default stays ours: paramiko has other algorithms and types of keys than this `ssh`.
    """
    user = ["-l", host.user] if host.user else []
    answer = _settings((*options.openssh_words(host), *user), host.name, options.connect_timeout_s)
    defaults = _defaults(options.connect_timeout_s)
    return {key: values for key, values in answer.items() if values != defaults.get(key)}


def _host_lines(options: SshOptions) -> list[list[str]] | None:
    """Return the patterns of each Host line in the configuration; None where hosts may differ by more than these.

    `ssh` says which files it reads. Tokens, variables, Match, an Include in a block, and names that are made canonical
    or are quoted are left to it.
    """
    argv = ["ssh", "-v", "-G", "-T", *options.openssh_words(Host("host", ())), "--", "host"]
    try:
        done = run_briefly(argv, options.connect_timeout_s or timeouts().connect_s)
        paths = re.findall(r"^debug1: Reading configuration data (.*)$", done.stderr, re.MULTILINE)
        texts = [Path(path).read_text(errors="surrogateescape") for path in paths]
    except (OSError, subprocess.TimeoutExpired):
        return None
    found: list[list[str]] = []
    for text in texts:
        is_in_block = False
        for line in text.splitlines():
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            match = _LINE.fullmatch(line)
            keyword, value = (match["keyword"].lower(), match["value"]) if match else ("match", "")
            is_in_block |= keyword == "host"
            if keyword == "host":
                found.append(value.split())
            is_by_name = keyword in ("match", "canonicalizehostname") or (keyword == "include" and is_in_block)
            if is_by_name or set("%$") & set(value) or (keyword == "host" and set("\"'\\#") & set(value)):
                return None
    return found if texts else None


def _is_matched(name: str, patterns: Sequence[str]) -> bool:
    """Whether a Host line with these patterns is for a host (ssh_config(5), PATTERNS)."""
    kinds = {
        pattern.startswith("!") for pattern in patterns if fnmatchcase(name, pattern.lstrip("!").replace("[", "[[]"))
    }
    return kinds == {False}


@functools.lru_cache(maxsize=2)
def _defaults(timeout_s: float | None) -> Answer:
    return _settings(("-F", "none"), "host", timeout_s)


def _settings(words: tuple[str, ...], name: str, timeout_s: float | None) -> Answer:
    argv = ["ssh", "-G", "-T", *words, "--", name]
    timeout_s = timeout_s or timeouts().connect_s
    try:
        done = run_briefly(argv, timeout_s)
    except subprocess.TimeoutExpired:
        raise TransportError(
            f"the SSH config was not evaluated within {timeout_s:g} s",
            where=name,
            hint=f"does a program of Match exec end, and a name server answer? Try: {shlex.join(argv)}",
        ) from None
    except OSError as error:
        raise TransportError(
            f"ssh, which evaluates the SSH config, cannot be started: {error.strerror}",
            where=name,
            hint=f"install OpenSSH's client here; or {named('ssh_config')} none {named('ssh')} paramiko does without"
            " it, and without a config",
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()  # the last one says how many mistakes there are
        mistakes = "; ".join(lines[:-1] or lines) or f"exit status {done.returncode}"
        raise TransportError(f"ssh does not accept the SSH config: {mistakes}", where=name, hint="correct it there")
    answer: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        keyword, _, value = line.partition(" ")
        answer.setdefault(keyword.lower(), []).append(value)
    return answer


def _only_openssh(one: Callable[..., str], key_files: Sequence[str]) -> Iterator[str]:
    """Yield the settings that need OpenSSH."""
    for name, harmless in _ONLY_OPENSSH.items():
        value = one(name.lower())
        if value and value.lower() not in harmless:
            yield name
    if one("preferredauthentications").startswith("gssapi"):
        yield "PreferredAuthentications"
    if Path(one("controlpath", "none")).is_socket():  # a connection that is open, which `ssh` would share
        yield "ControlPath"
    if any(re.search(r"%[A-Za-z]", name) for name in key_files):  # %C and %j, whose meaning differs between versions
        yield "IdentityFile"


def _filled_in(value: str, tokens: Mapping[str, str]) -> str:
    """Return a file name with its tokens, ${NAME} and ~ replaced (ssh_config(5), TOKENS); unknown ones stay."""
    value = re.sub(r"^~(?=/|$)", lambda _: tokens["d"], value)
    value = re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), value)
    return _VARIABLE.sub(lambda match: os.environ.get(match["name"], match[0]), value)


def _known_hosts_files(one: Callable[..., str], options: SshOptions, tokens: Mapping[str, str]) -> tuple[Path, ...]:
    if options.known_hosts is not None:
        return (options.known_hosts,)
    lists = (one("userknownhostsfile", _USER_KNOWN_HOSTS), one("globalknownhostsfile", _GLOBAL_KNOWN_HOSTS))
    # `ssh -G` quotes no blanks: a name begins where a path does.
    names = [name for text in lists for name in re.split(r" (?=[/~])", text)]
    return tuple(Path(_filled_in(name, tokens)) for name in names if name.lower() != "none")
