"""One command on one host under a plain shell: no Python, nothing installed on the far side.

`launch exec` runs commands so. What the shell guarantees, and how, is in `hosts.shell_script`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

from launcher.base.errors import Diagnostic, TransportError
from launcher.fleet.member import READ_BYTES, Emit, Member
from launcher.hosts.session import FOLDER_HINT, GRACE_S, HostRun
from launcher.hosts.shell_script import NO_FOLDER, NO_GROUP, STOP_LINE, MarkedStream, script_for
from launcher.job.environment import forwarded
from launcher.transport.api import Channel
from launcher.transport.command import SETUP_FAILED
from launcher.transport.diagnose import last_words, setup_failure, shell_hint

_STATUS_WAIT_S = 1.0
_STDERR_WAIT_S = 5.0  # for the mark on stderr, which the shell writes together with the one on stdout
_KILLED = 128 + 9


class ShellSession(Member):
    """One host whose channel leads to `/bin/sh`; the task's command is a program and its arguments."""

    def __init__(self, run: HostRun) -> None:
        super().__init__(run.task.host)
        self.run = run
        self._mark = os.urandom(16).hex()
        self._num_stop_lines = 0
        self._lost: TransportError | None = None
        self._stderr_done = threading.Event()
        self._stdout = MarkedStream(self._mark, lambda data: run.keep(data, run.result.stdout))
        self._stderr = MarkedStream(self._mark, lambda data: run.keep(data, run.result.stderr))

    def follow(self, channel: Channel, emit: Emit) -> None:
        channel.listen_stderr(self._take_stderr)
        task = self.run.task
        variables = {} if self.transport == "local" else forwarded(os.environ)
        variables |= self.run.variables
        self.run.result.started_s = time.time()
        try:
            channel.write(script_for(self._mark, task.command, task.cwd, variables, GRACE_S))
        except TransportError as error:  # the shell may have ended already: its status says more
            self._lost = error
        while self._stdout.end is None and (data := channel.read(READ_BYTES)):
            self._stdout.feed(data)
            self.has_answered = self.has_answered or self._stdout.has_begun
        self._stdout.finish()
        if self._stdout.has_begun:
            self._stderr_done.wait(_STDERR_WAIT_S)
        self._conclude(channel)
        channel.close()

    def stop(self, grace_s: float) -> None:
        num_wanted = 1 if grace_s > 0 else 2
        missing, self._num_stop_lines = num_wanted - self._num_stop_lines, num_wanted
        if self.channel is not None and missing > 0:
            with contextlib.suppress(TransportError):
                self.channel.write(STOP_LINE * missing)

    def hang_up(self) -> None:
        if self.channel is not None and not self.ended:
            self.channel.close_stdin()

    def _take_stderr(self, data: bytes) -> None:
        self._stderr.feed(data)
        if not data:
            self._stderr.finish()
        if not data or self._stderr.end is not None:
            self._stderr_done.set()

    def _conclude(self, channel: Channel) -> None:
        """Understand what the shell said last. Raises: TransportError when the command has no exit code."""
        last, result = self._stdout.end, self.run.result
        if last is not None and last.isdigit():
            result.exit_code = int(last)
        elif last == NO_FOLDER:
            words = bytes(result.stderr).decode("utf-8", "replace").strip()
            result.stderr.clear()
            result.error = Diagnostic(f"it could not be started in {self.run.task.cwd}: {words}", None, FOLDER_HINT)
        elif last == NO_GROUP:
            raise TransportError(
                "its SSH server gives commands no process group of their own, so this one could not be ended safely",
                hint="use --supervise, which needs Python there",
            )
        elif self._num_stop_lines:
            result.exit_code = _KILLED
        else:
            raise self._unfinished(channel)

    def _unfinished(self, channel: Channel) -> TransportError:
        status = channel.wait(_STATUS_WAIT_S)
        if status is None:
            return self._lost or TransportError("the connection was lost")
        if self._stdout.has_begun:
            return TransportError(f"its shell was ended before the command (exit status {status})")
        stderr = channel.stderr_tail()
        if SETUP_FAILED in stderr:
            return setup_failure(self.name, status, stderr)
        words = last_words(stderr, self._stdout.noise)
        problem = f"no shell could be started (exit status {status})" + (f": {words}" if words else "")
        return TransportError(problem, where=self.name, hint=shell_hint(self.name, words))
