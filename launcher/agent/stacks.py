"""What ranks are in, on request: the Python stacks, the collectives they have entered, native stacks by py-spy.

A request ends by itself: nothing here waits. Ranks write into files of the agent's folder, py-spy runs as a child, and
each turn of the agent's loop sends what is there. A rank that cannot answer, because it is stopped, waits in the kernel
or holds the interpreter's lock, is sent with what the kernel says of it. Loaded with the agent: when a job hangs, the
disk with this file may be what it hangs in.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

from launcher.agent.spawn import OWN_THREADS, RankProcess, read_object, without_own_frames
from launcher.agent.wire import Stacks
from launcher.base import env
from launcher.base.processes import state_of
from launcher.base.signals import STACKS_SIGNAL
from launcher.base.timeouts import timeouts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

_PYTHON_WAIT_S = 0.3  # faulthandler writes within milliseconds, on a busy machine a little later
_AT_ONCE = 4  # py-spy reads the symbols of torch's libraries: seconds of a core for each
_MAX_NATIVE_BYTES = 1 << 20
_MAX_FRAME_CHARS = 160  # the name of a template of C++ may have thousands
_NOT_RUNNING = {  # by the state of the process
    "T": "stopped by a signal: state T in /proc; kill -CONT {} continues it",
    "t": "stopped by a debugger: state t in /proc",
    "D": "waits for a device or a file system: state D in /proc",
}
_OWN_FRAME = re.compile(r"launcher/(?:start|worker|api/rank)\.py:\d+\)$|\((?:<frozen )?runpy(?:\.py|>):\d+\)$")
_NO_LOCK = "Python does not run in it: a native call holds the interpreter's lock, or the host is overloaded"
_REFUSED = (
    "  (no native stack: this host does not let py-spy look at processes; let root set kernel.yama.ptrace_scope to 0,"
    " or give the container the capability SYS_PTRACE)\n"
)
_NOT_INSTALLED = "  (no native stack: py-spy is not installed here; pip install 'launch-zero[native]')\n"
_TOO_LATE = "  (no native stack: py-spy has not ended in time)\n"


class StackRequest:
    """One request for what the ranks of this node are in: begun by its construction, over once `is_over`."""

    def __init__(self, ranks: Iterable[RankProcess], *, native: bool) -> None:
        """native: native stacks of all ranks; else only of those that do not answer, where py-spy is installed.

        Sends each rank STACKS_SIGNAL, which must not reach one that was reaped: another process may have its pid.
        """
        now_s, limits = time.monotonic(), timeouts()
        self._is_native = native
        self._python_at_s = now_s + _PYTHON_WAIT_S
        self._answer_until_s = now_s + max(_PYTHON_WAIT_S, limits.collectives_s)
        self._end_s = self._answer_until_s + limits.py_spy_s * (2 if native else 1)
        self._program = find_py_spy()
        self._asked = [_Asked(rank) for rank in ranks if rank.status is None]

    @property
    def is_over(self) -> bool:
        """Whether everything was sent."""
        return not self._asked

    def take_answers(self) -> Iterator[Stacks]:
        """Yield what has become known since the last call, one message for each rank."""
        now_s = time.monotonic()
        for asked in list(self._asked):
            if asked.rank.status is not None:
                asked.end_py_spy()
            elif self._is_complete(asked, now_s):
                yield asked.message()
            else:
                continue
            self._asked.remove(asked)

    def abandon(self) -> None:
        """End the request: another one takes its place."""
        for asked in self._asked:
            asked.end_py_spy()
        self._asked = []

    def _is_complete(self, asked: _Asked, now_s: float) -> bool:
        """Look for what is known of a rank by now; returns whether that is all."""
        if not asked.is_known and not asked.look(now_s, self._python_at_s, self._answer_until_s):
            return False
        return not self._wants_native(asked) or self._has_native(asked, now_s)

    def _wants_native(self, asked: _Asked) -> bool:
        if self._is_native and self._program is None:
            asked.native_text = _NOT_INSTALLED
        return self._program is not None and (self._is_native or asked.is_stuck)

    def _has_native(self, asked: _Asked, now_s: float) -> bool:
        """Have py-spy run for a rank, in its turn; returns whether there is nothing left to wait for."""
        is_turn = sum(each.py_spy is not None for each in self._asked) < _AT_ONCE
        if asked.py_spy is None and now_s < self._end_s and is_turn:
            asked.py_spy = _PySpy(self._program or "", asked.rank.pid, reads_only=asked.is_stopped)
        if asked.py_spy is not None and asked.py_spy.has_ended():
            asked.native_text = asked.py_spy.text()
        elif now_s >= self._end_s:
            asked.native_text = _TOO_LATE
        else:
            return False
        asked.end_py_spy()
        return True


class _Asked:
    """One rank that was asked."""

    def __init__(self, rank: RankProcess) -> None:
        self.rank = rank
        self.is_known = False  # what Python says of it, or that it says nothing
        self.py_spy: _PySpy | None = None  # while it runs
        self.native_text = ""
        self._is_listening = False  # its thread has heard the request
        self._text, self._why_silent, self._state = "", "", ""
        self._answer: dict[str, Any] | None = None
        with contextlib.suppress(OSError):
            os.unlink(rank.collectives_file)
        self._ask()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(rank.pid, STACKS_SIGNAL)

    @property
    def is_stopped(self) -> bool:
        """Whether the kernel does not let it run."""
        return self._state in _NOT_RUNNING

    @property
    def is_stuck(self) -> bool:
        """Whether Python says nothing, or cannot."""
        return self.is_stopped or bool(self._why_silent)

    def look(self, now_s: float, python_at_s: float, answer_until_s: float) -> bool:
        """Read what the rank has left so far; returns whether that is all."""
        if not self._is_listening:
            self._ask()
        if self._answer is None and self._is_listening:
            self._answer = read_object(self.rank.collectives_file)
        if now_s < python_at_s:
            return False
        self._state = state_of(self.rank.pid)
        # The thread of a rank that is stopped has left the pipe: a stop interrupts what waits for a writer.
        is_silent = self._answer is None and (self._is_listening or self.is_stopped)
        if is_silent and not self.is_stopped and now_s < answer_until_s:
            return False
        self._text = without_own_frames(_take_text(self.rank.stacks_file))
        why = _NOT_RUNNING.get(self._state, _NO_LOCK).format(self.rank.pid)
        if is_silent:
            self._why_silent = why
            self._text += f"  ({why})\n"
        self.is_known = True
        return True

    def _ask(self) -> None:
        """Open the pipe at whose other end the rank's thread waits, if there is one; see `compat.collectives`."""
        path = self.rank.collectives_file + env.REQUEST_SUFFIX
        with contextlib.suppress(OSError):  # ENXIO: the rank has no reader
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            self._is_listening = True

    def end_py_spy(self) -> None:
        """End the py-spy that runs for it, if one does."""
        if self.py_spy is not None:
            self.py_spy.end()
            self.py_spy = None

    def message(self) -> Stacks:
        """Return what is known of the rank."""
        return Stacks(self.rank.number, self._text + self.native_text, self._answer, self._why_silent)


class _PySpy:
    """py-spy, which prints the stacks of one process."""

    def __init__(self, program: str, pid: int, *, reads_only: bool) -> None:
        """reads_only: the process is stopped or waits in the kernel. For native frames py-spy stops a process for a
        moment and waits for that, which may be for ever then: only its memory is read, for its Python frames."""
        self._output = bytearray()
        self._has_ended = False
        try:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [program, "dump", "--nonblocking" if reads_only else "--native", "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
            )
        except OSError as error:
            self._process, self._has_ended = None, True
            self._output += f"Error: {program}: {error.strerror}".encode()
            return
        self._process.returncode = 0  # the agent's loop reaps all its children: Popen must not wait for this one
        if self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)

    def has_ended(self) -> bool:
        """Read what it has printed, without waiting; returns whether that is all."""
        while not self._has_ended and self._process is not None and self._process.stdout is not None:
            data: bytes | None = self._process.stdout.read(_MAX_NATIVE_BYTES)  # None: there may be more later
            if data is None:
                break
            self._has_ended = not data or len(self._output) > _MAX_NATIVE_BYTES
            self._output += data
        return self._has_ended

    def end(self) -> None:
        """End it, without waiting: one that waits in the kernel cannot be ended."""
        # Its output has not ended, so it runs or was not reaped: no other process has its pid.
        if not self.has_ended() and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()

    def text(self) -> str:
        """Return the frames that it has printed, in our form."""
        return _native_text(self._output.decode("utf-8", "replace"))


def _native_text(output: str) -> str:
    """Return the frames that py-spy has printed, but for those that lead to the user's code; a line where it failed."""
    if "Permission Denied" in output or "Operation not permitted" in output:
        return _REFUSED
    head, found, frames = output.partition("\nThread ")
    if not found:
        why = next((line for line in head.splitlines() if line.startswith(("Error", "  "))), "").strip()
        return f"  (no native stack: py-spy says {why or 'nothing'})\n" if head else ""
    threads = [
        part for part in f"Thread {frames}".split("\nThread ") if not any(f"{path}:" in part for path in OWN_THREADS)
    ]
    lines = [line for line in "\nThread ".join(threads).splitlines() if not _OWN_FRAME.search(line)]
    cut = [line if len(line) <= _MAX_FRAME_CHARS else line[: _MAX_FRAME_CHARS - 1] + "…" for line in lines]
    return "".join(f"  {line}\n" for line in ("by py-spy:", *filter(str.strip, cut)))


def find_py_spy() -> str | None:
    """Return the path of py-spy: beside this interpreter, else in PATH; None where it is not installed."""
    folders = [os.path.dirname(sys.executable), *os.get_exec_path()]
    paths = (os.path.join(folder, "py-spy") for folder in folders if folder)
    return next((path for path in paths if os.access(path, os.X_OK) and os.path.isfile(path)), None)


def _take_text(path: str) -> str:
    """Return what a file holds and empty it; "" when there is none."""
    try:
        with open(path, "r+", encoding="utf-8", errors="replace") as file:
            text = file.read()
            file.truncate(0)
    except OSError:
        return ""
    return text
