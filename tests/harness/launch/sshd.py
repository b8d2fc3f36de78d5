"""A throwaway sshd on 127.0.0.0/8: every address of that net is a "host" for tests.

Also a command, to try things by hand: `PYTHONPATH=tests python -m harness.launch.sshd FOLDER` prints the path of its
ssh_config and serves until its stdin ends.
"""

from __future__ import annotations

import abc
import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TypeVar

from harness.launch.command import slowness
from harness.ports import free_port

_SSHD = "/usr/sbin/sshd"
_START_TIMEOUT_S = 10.0
SETTINGS = """\
ListenAddress 0.0.0.0:{port}
HostKey {host_key}
PidFile none
AuthorizedKeysFile {folder}/authorized_keys
UsePAM no
UseDNS no
StrictModes no
PermitRootLogin prohibit-password
AuthenticationMethods publickey
MaxStartups 1000:30:2000
MaxSessions 1000
LoginGraceTime 600
AllowTcpForwarding yes
SetEnv SHLVL=5{more_env}
"""


def available() -> str | None:
    """Return why no sshd can be started here, None when one can."""
    if not os.access(_SSHD, os.X_OK):
        return f"{_SSHD} is not installed (apt-get install openssh-server)"
    if shutil.which("ssh-keygen") is None:
        return "ssh-keygen is not installed (apt-get install openssh-client)"
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    return None


_S = TypeVar("_S", bound="Server")


class Server(abc.ABC):
    """Programs that serve within a `with` block, and their folder, which goes with them where it was made for them."""

    folder: Path
    _owns_folder: bool

    @abc.abstractmethod
    def start(self) -> None: ...

    @abc.abstractmethod
    def stop(self) -> None: ...

    def __enter__(self: _S) -> _S:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._owns_folder:
            shutil.rmtree(self.folder, ignore_errors=True)


class LoopbackSshd(Server):
    """Serve SSH on 127.0.0.* at one port, with keys of its own; a context manager.

    `ssh_config` and `known_hosts` are all that a client needs; `stop` and `change_host_key` play failures.
    """

    def __init__(self, folder: Path | None = None, settings: str = "") -> None:
        """settings: lines of sshd_config that win over the usual ones."""
        self._settings = settings
        self._owns_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="sshd-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.user = getpass.getuser()
        self.host_key = self.folder / "host_key"
        self.user_key = self.folder / "user_key"
        self.known_hosts = self.folder / "known_hosts"
        self.ssh_config = self.folder / "ssh_config"
        self.log = self.folder / "sshd.log"
        self._process: subprocess.Popen[bytes] | None = None
        make_key(self.host_key)
        make_key(self.user_key)
        shutil.copy(f"{self.user_key}.pub", self.folder / "authorized_keys")
        self.write_known_hosts()
        self.ssh_config.write_text(
            f"Host 127.0.0.*\n  Port {self.port}\n  User {self.user}\n  IdentityFile {self.user_key}\n"
            f"  IdentitiesOnly yes\n  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile none\n"
        )

    @property
    def host_key_line(self) -> str:
        """`ssh-ed25519 AAAA...` of the server."""
        return " ".join(Path(f"{self.host_key}.pub").read_text().split()[:2])

    @property
    def pid(self) -> int | None:
        """Process id of the running server."""
        return None if self._process is None else self._process.pid

    def write_known_hosts(self) -> None:
        """Make every address of the net known with the server's present key."""
        self.known_hosts.write_text(f"[127.0.0.*]:{self.port} {self.host_key_line}\n")

    def change_host_key(self) -> None:
        """Replace the server's key and leave known_hosts as it is; the server is restarted."""
        self.stop()
        for path in (self.host_key, Path(f"{self.host_key}.pub")):
            path.unlink()
        make_key(self.host_key)
        self.start()

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        reason = available()
        if reason is not None:
            raise RuntimeError(reason)
        config = self.folder / "sshd_config"
        config.write_text(
            self._settings + SETTINGS.format(port=self.port, host_key=self.host_key, folder=self.folder, more_env="")
        )
        self._process = subprocess.Popen(
            # A test run that is killed leaves no daemon behind.
            ["setpriv", "--pdeathsig", "TERM", _SSHD, "-D", "-f", str(config), "-E", str(self.log)],
            stdin=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _START_TIMEOUT_S * slowness()
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    raise RuntimeError(f"sshd did not start:\n{self.log.read_text()}") from None
                time.sleep(0.02)

    def stop(self) -> None:
        """End the listening server; sessions already open live on. Idempotent."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


class StalledServer:
    """Accept connections at a port of 127.0.0.* and never say a word; a context manager."""

    def __enter__(self) -> StalledServer:
        self._socket = socket.create_server(("0.0.0.0", 0), backlog=1024)
        self.port = int(self._socket.getsockname()[1])
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


class MuteServer:
    """An SSH server on 127.0.0.* that stops answering at one step of a login; a context manager.

    Steps: "login", "session", "command". Where it stops, it waits until the end of the context.
    """

    def __init__(self, folder: Path, step: str) -> None:
        """folder: gets the host key, a user key and the ssh_config that reaches the server."""
        folder.mkdir(parents=True, exist_ok=True)
        self._step, self._over = step, threading.Event()
        self._host_key, user_key = folder / "host_key", folder / "user_key"
        make_key(self._host_key)
        make_key(user_key)
        self._socket = socket.create_server(("0.0.0.0", 0), backlog=512)
        port = self._socket.getsockname()[1]
        known_hosts, self.ssh_config = folder / "known_hosts", folder / "ssh_config"
        public = Path(f"{self._host_key}.pub").read_text()
        known_hosts.write_text(f"[127.0.0.*]:{port} {' '.join(public.split()[:2])}\n")
        self.ssh_config.write_text(
            f"Host 127.0.0.*\n  Port {port}\n  IdentityFile {user_key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {known_hosts}\n  GlobalKnownHostsFile none\n"
        )

    def __enter__(self) -> MuteServer:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._socket.close()

    def _serve(self) -> None:
        import paramiko

        key = paramiko.Ed25519Key.from_private_key_file(str(self._host_key))
        step, over = self._step, self._over

        class Mute(paramiko.ServerInterface):
            def get_allowed_auths(self, username: str) -> str:
                return "publickey"

            def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
                return self._unless("login", paramiko.AUTH_SUCCESSFUL)

            def check_channel_request(self, kind: str, chanid: int) -> int:
                return self._unless("session", paramiko.OPEN_SUCCEEDED)

            def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
                return bool(self._unless("command", 1))

            def _unless(self, name: str, answer: int) -> int:
                if name == step:
                    over.wait()
                return answer

        self._connections = []
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            connection = paramiko.Transport(client)
            connection.add_server_key(key)
            connection.start_server(event=threading.Event(), server=Mute())
            self._connections.append(connection)


class DroppingServer:
    """Drop the first connections at a port of 127.0.0.1 and pass the later ones on to `port`; a context manager."""

    def __init__(self, port: int, num_dropped: int, after_bytes: int = 0) -> None:
        """after_bytes: of the server's that are passed on before a connection is dropped."""
        self._target = port
        self._left = num_dropped
        self._after_bytes = after_bytes

    def __enter__(self) -> DroppingServer:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            if self._left > 0:
                self._left -= 1
                if not self._after_bytes:
                    client.close()
                    continue
                limit = self._after_bytes
            else:
                limit = None
            server = socket.create_connection(("127.0.0.1", self._target))
            for source, sink, most in ((client, server, None), (server, client, limit)):
                threading.Thread(target=_copy, args=(source, sink, most), daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket, most: int | None) -> None:
    """Pass on all bytes, or `most` of them and then end both connections."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16 if most is None else most):
            sink.sendall(data)
            if most is not None and (most := most - len(data)) <= 0:
                source.shutdown(socket.SHUT_RDWR)
                sink.shutdown(socket.SHUT_RDWR)
                return
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def make_key(path: Path, passphrase: str = "") -> None:
    """Make an ed25519 key pair at `path` and `path`.pub."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(path), "-C", path.name]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    with LoopbackSshd(Path(sys.argv[1])) as server:
        print(server.ssh_config, flush=True)
        sys.stdin.read()
