"""One command on one host under a plain shell: no Python, nothing installed on the far side.

`launch exec` runs commands so. What the shell guarantees, and how, is in `hosts.shell_session`.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from launcher.base.env import SETUP_CHANGED
from launcher.base.errors import Diagnostic, TransportError
from launcher.fleet.host_link import READ_BYTES, Emit, HostLink
from launcher.hosts.session import FOLDER_HINT, GRACE_S, HostRun
from launcher.plan.variables import forwarded
from launcher.transport.api import Channel
from launcher.transport.command import SETUP_FAILED
from launcher.transport.diagnose import last_words, setup_failure, shell_hint

# ---- The script that a plain shell reads ----
# The shell's own command line is a constant (`transport.command.SHELL_COMMAND`); folder, variables and arguments
# stand in the script, each in single quotes, where no byte but the quote itself means anything to a shell. The shell
# leads a session and process group of its own (sshd and `LocalTransport` see to that). The command runs in the
# foreground of it, beside a watcher that waits for our end of stdin:
#
# * a line asks the watcher to end the group (TERM, then KILL after the grace); a second line to kill it at once;
# * the end of stdin means that we are gone: TERM, then KILL after the grace.
#
# A normal end ends the watcher first, so that what the command left running on purpose continues. An unguessable mark
# is written before and after the command's bytes on both streams: what login scripts print does not count, and no
# process that still holds a stream open is waited for.


STOP_LINE = b"\n"
NO_FOLDER = "folder"
NO_GROUP = "group"
_MAX_END_BYTES = 32  # of the line behind the last mark
_MAX_NOISE_BYTES = 2048
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXPORT = b"export %(name)s=%(value)s\n"
_EXPORT_UNLESS_CHANGED = (
    b'case " $' + SETUP_CHANGED.name.encode() + b' " in *" %(name)s "*) ;; *) export %(name)s=%(value)s;; esac\n'
)

# `kill -NAME -GROUP` is the one form that dash, bash and busybox share; `exec --` is none of dash's.
# ksh93 says 256 + N of a command that signal N ended, every other shell 128 + N.
# Everything is one compound command, so that a shell has read all of it before it runs any of it. stderr of the shell
# itself goes nowhere while the command runs: bash would show the whole text of a command that a signal ended.
_SCRIPT = b"""{
m=%(mark)s
exec 3<&0 4>&2 </dev/null 2>/dev/null
stopped=
trap stopped=1 HUP INT TERM
echo $m; echo $m >&4
if kill -0 -$$; then :; else echo $m %(no_group)s; exit 1; fi
if cd -- %(folder)s 2>&4; then :; else echo $m %(no_folder)s; echo $m >&4; exit 1; fi
(
trap '' HUP INT TERM
exec <&3 >/dev/null 4>&-
if read -r line; then
kill -TERM -$$
( sleep %(grace_s)d; kill -KILL -$$ ) &
read -r line && kill -KILL -$$
wait
else
kill -TERM -$$
sleep %(grace_s)d
kill -KILL -$$
fi
) &
watcher=$!
(
%(exports)sunset LAUNCH_SETUP_CHANGED
exec 2>&4 3<&- 4>&-
exec %(command)s
)
code=$?
if test $code -gt 256; then code=$((code - 128)); fi
if test -z "$stopped"; then kill -KILL $watcher; wait $watcher; fi
echo $m $code; echo $m >&4
exit
}
"""


def quote(text: str) -> bytes:
    """Return `text` as one word of a POSIX shell, whatever bytes it holds. Raises: ValueError for a NUL byte."""
    data = os.fsencode(text)
    if b"\0" in data:
        raise ValueError("no argument of a program can hold a NUL byte")
    return b"'" + data.replace(b"'", b"'\\''") + b"'"


def script_for(
    mark: str,
    command: Sequence[str],
    cwd: str,
    variables: Mapping[str, str],
    grace_s: float,
    forwarded_env: Mapping[str, str] | None = None,
) -> bytes:
    """Return the script that runs `command` in the folder `cwd`; its first word must not begin with "-".

    variables: given to the command beside the host's own; names that no shell can hold are left out.
    grace_s: between SIGTERM and SIGKILL, rounded up to whole seconds as POSIX `sleep` wants.
    forwarded_env: given to it, too, but for what a setup has changed.
    Raises: ValueError for words that cannot be passed on.
    """
    if command[0].startswith("-"):
        raise ValueError(f"{command[0]}: a shell would take this for an option of exec")
    exports = b"".join(
        (_EXPORT_UNLESS_CHANGED if name not in variables else _EXPORT)
        % {b"name": name.encode(), b"value": quote(value)}
        for name, value in {**(forwarded_env or {}), **variables}.items()
        if _NAME.fullmatch(name)
    )
    return _SCRIPT % {
        b"mark": mark.encode(),
        b"folder": quote(cwd),
        b"grace_s": int(-(-grace_s // 1)),
        b"exports": exports,
        b"command": b" ".join(map(quote, command)),
        b"no_group": NO_GROUP.encode(),
        b"no_folder": NO_FOLDER.encode(),
    }


class MarkedStream:
    """Takes one stream apart: what lies between the first mark and the last is the command's."""

    def __init__(self, mark: str, take: Callable[[bytes], None]) -> None:
        self.has_begun = False
        self.end: str | None = None  # what the shell said behind the last mark, once it has
        self._mark = mark.encode()
        self._take = take
        self.noise = b""  # the last of what came before the first mark: login scripts, or a shell that refuses
        self._held = b""  # may be the beginning of a mark

    def feed(self, data: bytes) -> None:
        """Take the next bytes; those after the last mark are dropped."""
        if self.end is not None:
            return
        if not self.has_begun:
            self.noise = (self.noise + data)[-_MAX_NOISE_BYTES:]
        data = self._held + data
        if not self.has_begun:
            _, found, data = data.partition(self._mark + b"\n")
            if not found:
                self._held = _[-len(self._mark) :]
                return
            self.has_begun = True
        place = data.find(self._mark)
        if place >= 0:
            last, is_whole, _ = data[place + len(self._mark) :].partition(b"\n")
            if is_whole or len(last) > _MAX_END_BYTES:
                self.end = last.decode("ascii", "replace").strip()
        else:
            place = self._kept_from(data)
        self._held = data[place:]
        if place:
            self._take(data[:place])

    def finish(self) -> None:
        """The stream has ended: what was held back is the command's after all, unless it holds a mark."""
        if self.has_begun and self.end is None and self._held and self._mark not in self._held:
            self._take(self._held)
        self._held = b""

    def _kept_from(self, data: bytes) -> int:
        """Return where the longest beginning of a mark at the end of `data` starts."""
        first = self._mark[:1]
        place = max(0, len(data) - len(self._mark) + 1)
        while (place := data.find(first, place)) >= 0:
            if self._mark.startswith(data[place:]):
                return place
            place += 1
        return len(data)


# ---- One command on one host under a plain shell ----


_STATUS_WAIT_S = 1.0
_STDERR_WAIT_S = 5.0  # for the mark on stderr, which the shell writes together with the one on stdout
_KILLED = 128 + 9


class ShellSession(HostLink):
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
        inherited = {} if self.transport == "local" else forwarded(os.environ)
        self.run.result.started_s = time.time()
        try:
            channel.write(script_for(self._mark, task.command, task.cwd, self.run.variables, GRACE_S, inherited))
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
