"""`launch ARGS` on a real pseudo-terminal, with an emulator that knows what a person would see."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shlex
import shutil
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pyte
from harness.launch.command import DEADLINE_S, ROOT, slowness

from launcher.base.processes import die_with_parent


class TerminalLaunch:
    """A `launch` command whose controlling terminal is ours."""

    def __init__(
        self,
        folder: Path,
        *args: str | Path,
        size: tuple[int, int] = (100, 30),
        term: str = "xterm",
        shell: str | None = None,
    ) -> None:
        """size: columns and rows. shell: one that starts the command, waits for it and has job control."""
        self.raw = b""
        self._screen = pyte.HistoryScreen(*size, history=100_000)
        self._stream = pyte.ByteStream(self._screen)
        command = [sys.executable, "-m", "launcher", *map(str, args)]
        line = shlex.join(command)
        if shell is not None:
            command = [shell, "--norc", "-i"]
        own = {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(folder / "state"), "TERM": term}
        environment = {**os.environ, **own}
        our_pid = os.getpid()
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            die_with_parent(our_pid)  # a test that fails half-way leaves no job behind
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup, or in the background of a script
            os.chdir(folder)
            time.sleep(0.1)  # until the window has its size
            os.execve(shutil.which(command[0]) or command[0], command, environment)
        self.resize(*size)
        if shell is not None:
            self.type(f"{line}\n".encode())

    def resize(self, columns: int, rows: int) -> None:
        """Give the window another size."""
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen.resize(rows, columns)

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._terminal, keys)

    def hang_up(self) -> None:
        """Close the window."""
        os.close(self._terminal)

    @property
    def visible(self) -> list[str]:
        """What is on the screen, without the empty rows at its end."""
        return "\n".join(row.rstrip() for row in self._screen.display).rstrip().split("\n")

    @property
    def everything(self) -> list[str]:
        """What has scrolled out at the top, and what is on the screen."""
        width = self._screen.columns
        above = ["".join(row[i].data for i in range(width)).rstrip() for row in self._screen.history.top]
        return above + self.visible

    @property
    def panel(self) -> list[str]:
        """The rows of the panel."""
        return [row for row in self.visible if row.startswith("│ ")]

    def read_until(self, condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
        """Look at the screen until a condition holds; fail when the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"waited for {what}:\n" + "\n".join(self.visible)
            assert self._read(), f"ended before {what}:\n" + "\n".join(self.visible)

    def read_for(self, duration_s: float) -> None:
        """Look at the screen for a while."""
        deadline_s = time.monotonic() + duration_s
        while time.monotonic() < deadline_s:
            self._read()

    def wait(self) -> int:
        """Read to the end and return the exit code; a command that hangs is killed and fails the test."""
        deadline_s = time.monotonic() + DEADLINE_S * slowness()
        while self._read():
            if time.monotonic() > deadline_s:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError("launch hung:\n" + "\n".join(self.visible))
        return self.exit_code()

    def exit_code(self) -> int:
        """Wait for the end without reading."""
        deadline_s = time.monotonic() + DEADLINE_S * slowness()
        while (ended := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > deadline_s:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError("launch hung")
            time.sleep(0.02)
        return os.waitstatus_to_exitcode(ended[1])

    def _read(self) -> bool:
        """Read what comes within a moment; False at the end."""
        if not select.select([self._terminal], [], [], 0.05)[0]:
            return True
        try:
            data = os.read(self._terminal, 1 << 16)
        except OSError:  # EIO: nobody has it open any more
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)
