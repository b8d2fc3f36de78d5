"""A process of `pool`: hold the SSH connections of some hosts.

stdin is the control socket. The process does what it is told there until that socket ends, then leaves at once; the far
ends notice that their connections are gone, and end what they run.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

from launcher.base.errors import Diagnostic, LauncherError
from launcher.cluster.cluster import Host
from launcher.transport.ssh.pool import MAX_ORDER_BYTES, as_fields
from launcher.transport.ssh.transport import SshChannel, SshOptions, SshTransport

_READ_BYTES = 1 << 18
_PATHS = ("config_file", "known_hosts", "root")
_NUM_SOCKETS = 2


class Helper:
    """Serves one control socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._channels: dict[int, SshChannel] = {}
        self._unwanted: set[int] = set()

    def serve(self) -> None:
        """Do what comes in until the socket ends."""
        transport: SshTransport | None = None
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._control, MAX_ORDER_BYTES, _NUM_SOCKETS)
            if not data:
                return
            order = json.loads(data)
            if "options" in order:
                transport = SshTransport(_options(order["options"]))
            elif "close" in order:
                self._close(order["close"])
            elif transport is not None:
                stream, errors = (socket.socket(fileno=descriptor) for descriptor in descriptors)
                threading.Thread(target=self._run, args=(transport, order, stream, errors), daemon=True).start()

    def _run(
        self, transport: SshTransport, order: dict[str, Any], stream: socket.socket, errors: socket.socket
    ) -> None:
        number = order["open"]
        try:
            channel = self._open(transport, order)
            channel.listen_stderr(lambda data: _pass_on(data, errors))
            threading.Thread(target=_feed, args=(stream, channel), daemon=True).start()
        except (LauncherError, OSError, RuntimeError) as error:  # RuntimeError: no thread is left
            own = Diagnostic(f"its helper process cannot serve it: {error}", order["host"][0])
            findings = error.diagnostics if isinstance(error, LauncherError) else [own]
            return self._answer(number, failed=[as_fields(found) for found in findings])
        self._answer(number, opened=True)
        while data := channel.read(_READ_BYTES):
            _pass_on(data, stream)
        _pass_on(b"", stream)
        self._answer(number, status=channel.wait(threading.TIMEOUT_MAX))
        with self._lock:
            self._channels.pop(number, None)

    def _open(self, transport: SshTransport, order: dict[str, Any]) -> SshChannel:
        number = order["open"]
        name, slots, user, port = order["host"]
        channel = transport.open(Host(name, tuple(slots), user, port))
        with self._lock:
            self._channels[number] = channel
            is_unwanted = number in self._unwanted
        if is_unwanted:
            channel.close()
        return channel

    def _close(self, number: int) -> None:
        with self._lock:
            self._unwanted.add(number)
            channel = self._channels.get(number)
        if channel is not None:
            channel.close()

    def _answer(self, number: int, **fields: Any) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._control.send(json.dumps({"number": number, **fields}).encode())


def _options(fields: dict[str, Any]) -> SshOptions:
    paths = {name: Path(value) for name in _PATHS if (value := fields[name]) is not None}
    given: dict[str, Any] = {**fields, **paths}
    return SshOptions(**given)


def _pass_on(data: bytes, sock: socket.socket) -> None:
    """Send `data`, or the end of the stream when there is none. Nobody may listen any more: then it is dropped."""
    with contextlib.suppress(OSError):
        if data:
            sock.sendall(data)
        else:
            sock.shutdown(socket.SHUT_WR)


def _feed(stream: socket.socket, channel: SshChannel) -> None:
    with contextlib.suppress(OSError, LauncherError):
        while data := stream.recv(_READ_BYTES):
            channel.write(data)
    channel.close_stdin()
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RD)  # whoever still writes learns that nobody reads


def main() -> None:
    """Serve the control socket that is stdin, then leave without waiting for any thread."""
    with contextlib.suppress(KeyboardInterrupt):
        Helper(socket.socket(fileno=os.dup(0))).serve()
    os._exit(0)
