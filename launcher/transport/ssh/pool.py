"""SSH from several processes: key exchange and encryption of many hosts fit no single interpreter lock.

Each helper process (`transport.ssh_helper`) holds the connections of a share of the hosts. A channel is two socket
pairs, one for stdin and stdout and one for stderr, whose far ends are handed to a helper together with the order to
open a host; a control socket carries orders and answers as JSON. Helpers ask nothing and end when their control socket
does, so that none outlives this process, however it ends.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.base import env
from launcher.base.errors import Diagnostic, TransportError
from launcher.cluster.cluster import Host
from launcher.transport.command import own_argv
from launcher.transport.ssh.config import SshOptions
from launcher.transport.ssh.transport import SshTransport
from launcher.transport.stderr_buffer import StderrTail

MAX_ORDER_BYTES = 1 << 16
_HELPER_MODULE = "launcher.transport.ssh.helper"
_TAIL_WAIT_S = 0.5


class SshPool:
    """Opens hosts through helper processes in turn; implements `Transport`."""

    def __init__(self, options: SshOptions, num_helpers: int) -> None:
        """Start the helpers. Raises: TransportError."""
        self._options = options
        self._plain = SshTransport(options)  # knows the command; connects to nothing
        self._helpers: list[_Helper] = []
        try:
            for _ in range(num_helpers):
                self._helpers.append(self._start_helper())
        except TransportError:
            self.close()
            raise
        self._turns = itertools.cycle(range(num_helpers))
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return "ssh"

    @property
    def pids(self) -> list[int]:
        """Process ids of the helpers."""
        return [helper.pid for helper in self._helpers]

    def command_for(self, host: Host) -> str:
        return self._plain.command_for(host)

    def open(self, host: Host) -> PooledChannel:
        return self._next_helper().open(host)

    def close(self) -> None:
        for helper in self._helpers:
            helper.close()
        for helper in self._helpers:
            helper.wait()

    def _next_helper(self) -> _Helper:
        """Return the helper whose turn it is; one that has ended is replaced. Raises: TransportError."""
        with self._lock:
            place = next(self._turns)
            helper = self._helpers[place]
            if helper.is_gone:
                helper.wait()
                helper = self._helpers[place] = self._start_helper()
            return helper

    def _start_helper(self) -> _Helper:
        try:
            return _Helper(self._options)
        except OSError as error:
            raise TransportError(
                f"a helper process for SSH cannot be started: {error.strerror or error}",
                hint=f"check the limits of `ulimit -a`, or do without: {env.SSH_PROCESSES.name}=0",
            ) from None


def as_fields(finding: Diagnostic) -> list[Any]:
    """Return a finding as JSON can hold it."""
    return list(finding.as_dict().values())


def _diagnostic(message: str, where: str | None, hint: str | None, shared: list[Any] | None) -> Diagnostic:
    return Diagnostic(message, where, hint, (shared[0], shared[1]) if shared else None)


class PooledChannel:
    """One SSH session that a helper holds; implements `Channel`."""

    def __init__(self, host_name: str, number: int, order: Callable[[dict[str, Any]], None]) -> None:
        self.far_ends: tuple[socket.socket, ...] = ()
        self.answered = threading.Event()
        self.failure: list[Diagnostic] | None = None
        self._host_name = host_name
        self._number = number
        self._order = order
        self._ended = threading.Event()
        self._status: int | None = None
        self._write_lock = threading.Lock()
        self._closed = False
        self._stream, stream = socket.socketpair()
        self._errors, errors = socket.socketpair()
        self.far_ends = (stream, errors)
        self._stderr = StderrTail(self._errors.recv, host_name)

    @property
    def host_name(self) -> str:
        return self._host_name

    @property
    def window_bytes(self) -> None:
        return None

    def take_answer(self, answer: dict[str, Any]) -> None:
        """Take what the helper says about this channel; on the thread that reads the helper."""
        if "failed" in answer:
            self.failure = [_diagnostic(*fields) for fields in answer["failed"]]
        if "status" in answer:
            self._status = answer["status"]
            self._ended.set()
        self.answered.set()

    def read(self, max_bytes: int) -> bytes:
        try:
            return self._stream.recv(max_bytes)
        except OSError:
            return b""

    def write(self, data: bytes) -> None:
        with self._write_lock:
            try:
                self._stream.sendall(data)
            except OSError:
                hint = self.stderr_tail() or None
                raise TransportError("the connection is gone", where=self._host_name, hint=hint) from None

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_WR)

    def stderr_tail(self) -> str:
        return self._stderr.text(_TAIL_WAIT_S if self._ended.is_set() else 0.0)

    def listen_stderr(self, take: Callable[[bytes], None]) -> None:
        self._stderr.listen(take)

    def wait(self, timeout_s: float) -> int | None:
        self._ended.wait(timeout_s)
        return self._status

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._order({"close": self._number})
        self.release()

    def release(self) -> None:
        """End both streams here; what waits on one is freed."""
        for sock in (self._stream, self._errors, *self.far_ends):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.close_far_ends()

    def close_far_ends(self) -> None:
        """Let go of what the helper holds now."""
        for sock in self.far_ends:
            sock.close()
        self.far_ends = ()

    def __del__(self) -> None:
        # As late as this, because a thread that still waits on a descriptor must not meet somebody else's file.
        for sock in (getattr(self, "_stream", None), getattr(self, "_errors", None), *self.far_ends):
            if sock is not None:
                sock.close()


class _Helper:
    """One helper process and the thread that reads its answers."""

    def __init__(self, options: SshOptions) -> None:
        """Start the process. Raises: OSError."""
        self._control, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            # A session of its own: a terminal's Ctrl-C reaches this process only, which then ends things in order.
            self._process = subprocess.Popen(
                own_argv(_HELPER_MODULE), stdin=far.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
            )
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._channels: dict[int, PooledChannel] = {}
        self.is_gone = False  # the process has ended, or is about to
        fields = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
        self._order({"options": fields})
        threading.Thread(target=self._read, name="ssh-helper", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def open(self, host: Host) -> PooledChannel:
        """Have the helper open `host`. Raises: TransportError."""
        number = next(self._numbers)
        try:
            channel = PooledChannel(host.name, number, self._order)
        except OSError as error:
            raise TransportError(
                f"no sockets for this host: {error.strerror}", where=host.name, hint="raise `ulimit -n`"
            ) from None
        with self._lock:
            self._channels[number] = channel
        order = {"open": number, "host": [host.name, list(host.slots), host.user, host.port]}
        self._order(order, *channel.far_ends)
        channel.close_far_ends()
        if self.is_gone:  # perhaps before the channel was among those that were told
            self._lose_all()
        channel.answered.wait()
        if channel.failure is not None:
            with self._lock:
                self._channels.pop(number, None)
            channel.release()
            raise TransportError.from_diagnostics(channel.failure)
        return channel

    def close(self) -> None:
        """Have the process end, and with it every connection it holds."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def wait(self) -> None:
        """Wait for the process after `close`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()

    def _order(self, order: dict[str, Any], *sockets: socket.socket) -> None:
        data = json.dumps(order).encode()
        # A helper that is gone is noticed by the reader.
        with self._lock, contextlib.suppress(OSError):
            socket.send_fds(self._control, [data], [sock.fileno() for sock in sockets])

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._control.recv(MAX_ORDER_BYTES):
                answer = json.loads(data)
                with self._lock:
                    channel = self._channels.get(answer["number"])
                    if "status" in answer:
                        self._channels.pop(answer["number"], None)
                if channel is not None:
                    channel.take_answer(answer)
        self.is_gone = True
        self._lose_all()
        self._control.close()

    def _lose_all(self) -> None:
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            lost = Diagnostic("the helper process of its SSH connection has ended", channel.host_name)
            if not channel.answered.is_set():
                channel.take_answer({"failed": [as_fields(lost)]})
            channel.take_answer({"status": None})
