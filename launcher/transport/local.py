"""The agent, or a plain shell, as a child process of this launcher.

The child leads a session of its own: a terminal's Ctrl-C reaches the launcher only, which then stops the
ranks in order through the protocol.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, TypeVar

from launcher.base import env
from launcher.base.errors import TransportError
from launcher.base.timeouts import timeouts
from launcher.transport.api import StderrTail
from launcher.transport.command import AGENT_MODULE, SHELL_ARGV, local_setup_argv, own_argv

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from launcher.cluster.cluster import Host

_TAIL_WAIT_S = 0.5
_C = TypeVar("_C")


def is_local(host_name: str) -> bool:
    """Return whether `host_name` means this machine: `localhost` or its own name.

    Addresses never do, 127.0.0.x included: a user who writes an address means the network.
    """
    own = os.uname().nodename.lower()
    return host_name.lower() in {"localhost", own, own.partition(".")[0]}


class LocalTransport:
    """Starts agents on this machine; implements `Transport`."""

    name = "local"

    def __init__(
        self,
        *,
        module: str = AGENT_MODULE,
        root: Path | None = None,
        shell_only: bool = False,
        passes_stdin: bool = False,
        setup: str = "",
    ) -> None:
        """shell_only: start /bin/sh instead of python and a module. passes_stdin: agents get our standard input.

        setup: shell text that runs first, as on hosts reached over SSH, but in this process's folder.
        """
        self._passes_stdin = passes_stdin
        self._argv = list(SHELL_ARGV) if shell_only else own_argv(module, root)
        # Closing stdin ends an agent, not a setup that still runs; under a plain shell the group is the user's command.
        self._ends_group = bool(setup) and not shell_only
        if setup:
            self._argv = local_setup_argv(setup, self._argv)
        # An agent's guard ends everything below it, see `agent.main`.
        self._end_signal = signal.SIGTERM if module == AGENT_MODULE and not shell_only else signal.SIGKILL
        self._lock = threading.Lock()
        self._channels: list[LocalChannel] = []
        self._ahead: subprocess.Popen[bytes] | None = None

    def command_for(self, host: Host) -> str:
        import shlex

        return shlex.join(self._argv)

    def start_ahead(self) -> None:
        """Start the agent that the first `open` will hand out, whose interpreter needs a while. `close` ends it."""
        with contextlib.suppress(OSError):  # `open` tries again, and says why it cannot be
            self._ahead = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as stack:
            passed: tuple[int, ...] = ()
            environ = None
            if self._passes_stdin and not _is_in_background():
                # The descriptor itself: what the rank does not read stays for the next reader, as without a launcher.
                passed = (os.dup(0),)
                stack.callback(os.close, *passed)
                environ = {**os.environ, env.STDIN_FD.name: str(passed[0])}
            return start_child(self._argv, environ, passed)

    def open(self, host: Host) -> LocalChannel:
        with self._lock:
            process, self._ahead = self._ahead, None
        try:
            process = process or self._start()
        except OSError as error:
            raise TransportError(
                f"{self._argv[0]} cannot be started: {error.strerror or error}",
                where=host.name,
                hint="check that it can be executed, and the limits of `ulimit -a`",
            ) from None
        channel = watched(
            process,
            host.name,
            lambda: LocalChannel(host.name, process, self._end_signal, ends_group=self._ends_group),
        )
        with self._lock:
            self._channels.append(channel)
        return channel

    def close(self) -> None:
        with self._lock:
            channels, self._channels = self._channels, []
            unused, self._ahead = self._ahead, None
        if unused is not None:
            with unused:  # closes its pipes and waits
                unused.send_signal(self._end_signal)
        for channel in channels:
            channel.close()


def start_child(
    argv: Sequence[str], environ: Mapping[str, str] | None, pass_fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a program with pipes on its three streams. It has no terminal: Ctrl-C does not reach it, nor it the user.

    environ: None: this process's own. Raises: OSError.
    """
    return subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        pass_fds=pass_fds,
        env=environ,
    )


def watched(process: subprocess.Popen[bytes], host_name: str, make: Callable[[], _C]) -> _C:
    """Return the channel that `make` makes of a process, which is ended where that fails. Raises: TransportError."""
    try:
        return make()
    except (OSError, RuntimeError) as error:  # no descriptor or no thread is left for this process
        with process:  # closes its pipes and waits
            process.kill()
        raise TransportError(f"the agent cannot be watched: {error}", where=host_name) from None


def _is_in_background() -> bool:
    """Whether our standard input is a terminal that others read from now: the shell, after `launch ... &`.

    The kernel would stop us for reading it. It would not stop a rank, which belongs to another session.
    """
    try:
        return os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # no terminal, or not the one that controls us
        return False


class LocalChannel:
    """Pipes to one child process; implements `Channel`."""

    window_bytes = None

    def __init__(
        self,
        host_name: str,
        process: subprocess.Popen[bytes],
        end_signal: signal.Signals = signal.SIGKILL,
        *,
        ends_group: bool = False,
    ) -> None:
        """end_signal: what ends the process at once; SIGKILL follows where it does not.

        ends_group: the process leads a group, which gets these signals.
        """
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise ValueError("the process needs pipes on stdin, stdout and stderr")
        self.host_name = host_name
        self._process = process
        self._end_signal, self._ends_group = end_signal, ends_group
        self._stdin = process.stdin
        # A bare descriptor: a file object could be collected, and closed, before this one.
        self._stdout = os.dup(process.stdout.fileno())
        process.stdout.close()
        # Readable once close() has run: it frees a reader or writer that waits on a pipe, because closing
        # a descriptor that another thread waits on would hand that thread another file.
        self._wake_read, self._wake_write = os.pipe()
        self._closed = threading.Event()
        self._write_lock = threading.Lock()
        self._stdin_open = True
        self._stderr = StderrTail(process.stderr.read, host_name, process.stderr.close)
        os.set_blocking(self._stdin.fileno(), False)

    @property
    def pid(self) -> int:
        """Process id of the agent."""
        return self._process.pid

    def read(self, max_bytes: int) -> bytes:
        if not self._wait_for(self._stdout, select.POLLIN):
            return b""
        return os.read(self._stdout, max_bytes)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        with self._write_lock:
            while view:
                if not self._stdin_open or not self._wait_for(self._stdin.fileno(), select.POLLOUT):
                    raise self._gone()
                try:
                    view = view[os.write(self._stdin.fileno(), view) :]
                except BlockingIOError:
                    continue
                except OSError:
                    raise self._gone() from None

    def close_stdin(self) -> None:
        with self._write_lock:
            if self._stdin_open:
                self._stdin_open = False
                self._stdin.close()

    def stderr_tail(self) -> str:
        return self._stderr.text(_TAIL_WAIT_S if self._process.poll() is not None else 0.0)

    def listen_stderr(self, take: Callable[[bytes], None]) -> None:
        self._stderr.listen(take)

    def wait(self, timeout_s: float) -> int | None:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return code if code >= 0 else 128 - code

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._kill(self._end_signal)
        os.write(self._wake_write, b"x")
        self.close_stdin()
        for _ in range(2):  # one that waits for a device is left to the kernel
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeouts().kill_s)
                return
            self._kill(signal.SIGKILL)

    def _kill(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._ends_group and self._process.poll() is None:  # it is not reaped, so the group's number is ours
                os.killpg(self._process.pid, number)
            else:  # Popen.send_signal checks that the child is not reaped yet, so no other process can be hit
                self._process.send_signal(number)

    def __del__(self) -> None:
        # stdout and the wake pipe live as long as any thread may still poll them: as long as this object.
        for name in ("_stdout", "_wake_read", "_wake_write"):
            if hasattr(self, name):
                os.close(getattr(self, name))

    def _wait_for(self, descriptor: int, event: int) -> bool:
        """Wait until `descriptor` has `event`; False when the channel was closed instead."""
        poller = select.poll()
        poller.register(descriptor, event)
        poller.register(self._wake_read, select.POLLIN)
        poller.poll()
        return not self._closed.is_set()

    def _gone(self) -> TransportError:
        return TransportError(
            "the agent is gone: its stdin is closed", where=self.host_name, hint=self.stderr_tail() or None
        )
