"""Agents, or plain shells, through the system's `ssh`: one process for each host, with all that OpenSSH can do.

That is ProxyCommand, certificates of users and hosts, Kerberos, keys on security tokens, and connections that are open
already (ControlPath). `ssh` says what it does in a pipe of its own (-E), apart from the standard error of the far side.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import subprocess
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from launcher.base.errors import Diagnostic, TransportError
from launcher.base.fields import named
from launcher.base.timeouts import timeouts
from launcher.transport.api import StderrTail
from launcher.transport.local import LocalChannel, start_child, watched
from launcher.transport.ssh import library
from launcher.transport.ssh.config import Targets
from launcher.transport.ssh.options import SshOptions

if TYPE_CHECKING:
    from launcher.cluster.cluster import Host

LOGGER = "launcher.ssh"
_SETTINGS = {
    "BatchMode": "yes",
    "ServerAliveInterval": "10",
    "ServerAliveCountMax": "3",
    "ControlMaster": "no",  # an open connection is shared; one that we open ends with us
    "ClearAllForwardings": "yes",
    "RemoteCommand": "none",
    "UpdateHostKeys": "no",  # many of us would write known_hosts at a time
}
_NUM_STEPS = 3  # that may take ConnectTimeout each: a way through a proxy, the key exchange, the login
_POLL_S = 0.05
_LAST_WORDS_S = 0.5
_RETRY_DELAYS_S = (0.3, 1.0, 2.0)  # a busy server, or bastion, drops connections at random (MaxStartups)
_SSH_FAILED = 255  # an exit code of `ssh` itself; every other one is the command's
_CONNECTED = (b"Authenticated to ", b"master session id")  # the latter where a connection is shared
_CHATTER = ("debug", "Authenticated to ", "Transferred: ", "Bytes per second: ")
_TRY, _OR_TRY = "try: {ssh} true", "Try: {ssh} true"
_DROPPED = "the connection was closed before the login"
# What `ssh` may say, what it means, and what to do; the first that is found counts.
_CAUSES = (
    ("Could not resolve hostname", "the host name cannot be resolved", f"check its spelling; then {_TRY}"),
    (
        "Offending ",
        "the host key has changed",
        "this may be a man-in-the-middle attack; ask who runs the host, then forget the old key, as {ssh} true says",
    ),
    ("REVOKED", "the host key is revoked", "ask who runs the host"),
    (
        "host key is known",
        "the host key is not known",
        "compare the fingerprint and accept the key with: {ssh} true; or, on a network you trust, let launch record the"
        " keys of new hosts with {accept}",
    ),
    ("Host key verification failed", "the host key or certificate is not accepted", f"to see why, {_TRY}"),
    ("Too many authentication failures", "too many keys were offered", "name the right one with IdentityFile"),
    ("Bad configuration option", "the SSH config has an option that this `ssh` does not know", "leave it out there"),
    ("Permission denied", "the login was refused", "to see which keys and tickets are offered, try: {ssh} -v true"),
    ("Connection refused", "connection refused", f"is sshd running there, on this port? {_OR_TRY}"),
    ("imed out", "no answer in time", f"is the host up, and the port open? {_OR_TRY}"),
    (
        "kex_exchange_identification",
        _DROPPED,
        f"has the server, or a host on the way, room for one more connection? {_OR_TRY}",
    ),
    ("Connection closed by", _DROPPED, _TRY),
    ("Connection reset by", _DROPPED, _TRY),
)


class OpenSshTransport:
    """Starts agents with `ssh`; implements `Transport`."""

    name = "ssh"

    def __init__(self, options: SshOptions | None = None, targets: Targets | None = None) -> None:
        """targets: what is known already of the configuration that `options` names."""
        self._options = options or SshOptions()
        self._targets = targets or Targets(self._options)
        self._lock = threading.Lock()
        self._channels: list[OpenSshChannel] = []
        self._is_closed = False
        if self._options.verbose:
            library.log_to_stderr(LOGGER)

    def command_for(self, host: Host) -> str:
        return shlex.join(self._argv(host))

    def open(self, host: Host) -> OpenSshChannel:
        timeout_s = self._connect_timeout_s(host)
        for delay_s in (*_RETRY_DELAYS_S, None):
            channel = self._start(host, timeout_s)
            if channel.wait_for_login(_NUM_STEPS * timeout_s):
                return channel
            channel.close()
            found, is_dropped = self._failure(host, channel, timeout_s)
            if delay_s is None or not is_dropped:
                break
            time.sleep(delay_s)
        raise TransportError.from_diagnostics([found])

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()

    def _connect_timeout_s(self, host: Host) -> float:
        try:
            return self._targets.of(host).connect_timeout_s
        except TransportError:  # a configuration that only OpenSSH can read
            return self._options.connect_timeout_s or timeouts().connect_s

    def _argv(self, host: Host, *more: str) -> list[str]:
        """Return the command. more: further options of `ssh`."""
        strictness = "accept-new" if self._options.accept_new_host_keys else "yes"
        settings = {**_SETTINGS, "StrictHostKeyChecking": strictness}
        words = ["ssh", "-T", "-x", *self._options.openssh_words(host), *(["-l", host.user] if host.user else [])]
        words += [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
        return [*words, *more, "--", host.name, self._options.remote_command]

    def _start(self, host: Host, timeout_s: float) -> OpenSshChannel:
        """Start `ssh`. Raises: TransportError."""
        with self._lock:
            if self._is_closed:
                raise TransportError("the transport was closed while connecting", where=host.name)
            with contextlib.ExitStack() as undo:
                try:
                    log = _Log(host.name, is_shown=self._options.verbose)
                    undo.callback(log.end_writing)
                    timeout = f"ConnectTimeout={max(1.0, timeout_s):.0f}"
                    argv = self._argv(host, "-o", timeout, "-o", "LogLevel=DEBUG1", "-E", log.path)
                    process = start_child(argv, {**os.environ, "SSH_ASKPASS_REQUIRE": "never"})
                except (OSError, RuntimeError) as error:
                    raise TransportError(
                        f"ssh cannot be started: {getattr(error, 'strerror', None) or error}",
                        where=host.name,
                        hint=f"is OpenSSH's client installed here? {named('ssh_config')} none {named('ssh')} paramiko"
                        " does without it",
                    ) from None
                channel = watched(process, host.name, partial(OpenSshChannel, host.name, process, log))
                undo.pop_all()
            self._channels.append(channel)
            return channel

    def _failure(self, host: Host, channel: OpenSshChannel, timeout_s: float) -> tuple[Diagnostic, bool]:
        """Return why `ssh` never logged in, and whether it is worth another try."""
        words = channel.last_words()
        message, hint = f"no login within {_NUM_STEPS * timeout_s:g} s", _TRY
        line = words.splitlines()[-1] if words else ""
        if channel.has_ended:
            message = "ssh failed"
        for sign, meaning, remedy in _CAUSES:
            lines = [one for one in words.splitlines() if sign in one]
            if lines:
                message, hint, line = meaning, remedy, lines[-1].strip()
                break
        place = f"{host.user}@{host.name}" if host.user else host.name
        command = [shlex.join(["ssh", *self._options.openssh_words(host), name]) for name in (place, "HOST")]
        shown = f"{message}: {line}" if line else message
        of_this, of_any = (hint.format(ssh=ssh, accept=named("accept_new_host_keys")) for ssh in command)
        found = Diagnostic(shown, host.name, of_this, (message, of_any))
        return found, message == _DROPPED


class OpenSshChannel(LocalChannel):
    """Pipes to an agent or a shell behind one `ssh`; implements `Channel`."""

    def __init__(self, host_name: str, process: subprocess.Popen[bytes], log: _Log) -> None:
        self.has_ended = False  # before it had logged in
        self._log = log
        super().__init__(host_name, process, ends_group=True)  # a ProxyCommand is in it

    def wait_for_login(self, timeout_s: float) -> bool:
        """Wait until `ssh` has logged in; False when it ends before, or takes longer."""
        deadline_s = time.monotonic() + timeout_s
        while not self._log.is_connected.wait(_POLL_S):
            self.has_ended = self._process.poll() is not None
            if self.has_ended or time.monotonic() > deadline_s:
                return False
        return True

    def last_words(self) -> str:
        """Return what a way to the host, and `ssh` itself, said before the end."""
        return "\n".join(filter(None, (super().stderr_tail(), self._log.words(_LAST_WORDS_S))))

    def stderr_tail(self) -> str:
        return super().stderr_tail() or self._log.words()

    def wait(self, timeout_s: float) -> int | None:
        code = super().wait(timeout_s)
        return None if code == _SSH_FAILED else code

    def close(self) -> None:
        super().close()
        self._log.end_writing()


class _Log:
    """What one `ssh` says of itself, in a pipe that it opens by its `path`: it closes what it inherits."""

    def __init__(self, host_name: str, *, is_shown: bool) -> None:
        """Raises: OSError, RuntimeError."""
        read, write = os.pipe()
        self.path = f"/proc/{os.getpid()}/fd/{write}"
        self.is_connected = threading.Event()
        self._write_ends = [write]
        self._rest = b""
        self._shown = logging.getLogger(LOGGER) if is_shown else None
        self._host_name = host_name
        self._tail = StderrTail(partial(os.read, read), host_name, partial(os.close, read))
        self._tail.listen(self._take)

    def end_writing(self) -> None:
        """Close our end, so that the pipe ends with `ssh`: once that has opened it, or has ended. Idempotent."""
        with contextlib.suppress(IndexError):
            os.close(self._write_ends.pop())

    def words(self, wait_s: float = 0.0) -> str:
        """Return the last lines that a user can use; waits up to `wait_s` for the end."""
        return "\n".join(line for line in self._tail.text(wait_s).splitlines() if not line.startswith(_CHATTER))

    def _take(self, data: bytes) -> None:
        self.end_writing()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if any(sign in line for sign in _CONNECTED):
                self.is_connected.set()
            if self._shown is not None:
                self._shown.debug("%s: %s", self._host_name, line.decode("utf-8", "replace").rstrip())
