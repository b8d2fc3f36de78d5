"""What becomes of the output of ranks while `launcher.run` waits: watchers of a run.

sys.stdout and sys.stderr are looked up for every piece: notebooks and test runners replace them by streams of their
own. The launcher says nothing of its own there; its words go to the logger "launch".
"""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable

from launcher.agent.wire import RESULT, STDERR, STDOUT
from launcher.api.pickling import MAX_ANSWER_BYTES
from launcher.base.errors import ProtocolError, UsageError
from launcher.base.units import counted
from launcher.cli.console.lines import MixedLines
from launcher.job.events import Failure, RunReport, Watcher
from launcher.journal.verdicts import Verdict
from launcher.plan.plan import JobPlan

TakeLine = Callable[[int, str, str], object]  # gets rank, "stdout" or "stderr", and a line without its end

_logger = logging.getLogger("launch")


def output_for(wanted: str | TakeLine) -> Output:
    """Return the watcher that `output=` of `launcher.run` names. Raises: UsageError."""
    if callable(wanted):
        return CallableOutput(wanted)
    if wanted not in ("console", "files"):
        raise UsageError(f"output is {wanted!r}", hint='give "console", "files" or a function of rank, stream and line')
    return ConsoleOutput() if wanted == "console" else Output()


def write(stream: str, text: str) -> None:
    """Write to sys.stdout or sys.stderr, live."""
    target = sys.stdout if stream == STDOUT else sys.stderr
    target.write(text)
    # A kernel's stream shows within 0.2 s what it has; flushed by hand for every line it would be the bottleneck.
    if isinstance(target, io.TextIOWrapper):
        target.flush()


class Output(Watcher):
    """Keeps the answers of ranks and shows nothing: output is in the logs."""

    def __init__(self) -> None:
        self.answers: dict[int, bytearray] = defaultdict(bytearray)  # by rank, see `pickling.unpack_answer`
        self.plan: JobPlan | None = None  # of the last run

    def say(self, text: str) -> None:
        """Report what happens."""
        _logger.info("%s", text)

    def warning(self, text: str) -> None:
        _logger.warning("%s", text)

    def planned(self, plan: JobPlan) -> None:
        self.plan = plan
        self.answers.clear()
        num_ranks, logs = plan.placement.world_size, os.path.relpath(plan.run_folder)
        shown = plan.run_folder if logs.startswith("..") else logs
        self.say(f"job {plan.job_id} · {counted(num_ranks, 'rank')} · logs {shown}/")

    def waiting(self, what: str) -> None:
        self.say(f"waiting for {what}")

    def output(self, rank: int, stream: str, data: bytes) -> None:
        if stream == RESULT:
            self.answers[rank] += data
            if len(self.answers[rank]) > MAX_ANSWER_BYTES:
                raise ProtocolError(f"rank {rank} has sent more than it may")
        else:
            self.show(rank, stream, data)

    def show(self, rank: int, stream: str, data: bytes) -> None:
        """Show what a rank wrote."""

    def raised(self, failure: Failure) -> None:
        what = failure.traceback or failure.reason
        self.warning(f"rank {failure.rank} has failed but has not exited:\n{what.rstrip()}")

    def stopping(self, why: str) -> None:
        self.say(why)

    def restarting(self, plan: JobPlan, report: RunReport) -> None:
        why = report.failure.reason if report.failure else f"exit code {report.exit_code}"
        self.say(f"restart {plan.num_failures} of {plan.max_restarts} after: {why}")

    def stacks(self, text: str, path: str) -> None:
        self.warning(f"{text}\nstacks of all ranks: {path}")

    def verdict(self, verdict: Verdict) -> None:
        if verdict.until_step is None:
            self.warning(f"{verdict.text}; next: {verdict.next}")
        else:
            self.say(f"no longer, since step {verdict.until_step}: {verdict.text}")

    def finish(self) -> None:
        """Show what had no line end."""


class ConsoleOutput(Output):
    """Shows lines of ranks as `launch` does: prefixed with `[rank]`, stdout on sys.stdout and stderr on sys.stderr."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = {STDOUT: MixedLines(), STDERR: MixedLines()}

    def show(self, rank: int, stream: str, data: bytes) -> None:
        self._show(stream, self._lines[stream].feed(rank, self._prefix(rank), data))

    def idle(self) -> None:
        now_s = time.monotonic()
        for stream, lines in self._lines.items():
            self._show(stream, lines.settle(now_s))

    def finish(self) -> None:
        for stream, lines in self._lines.items():
            self._show(stream, lines.flush())

    def _prefix(self, rank: int) -> bytes:
        label = str(rank) if self.plan is None else self.plan.placement.label(rank)
        return f"[{label}] ".encode("utf-8", "replace")

    def _show(self, stream: str, data: bytes) -> None:
        if data:
            write(stream, data.decode("utf-8", "replace"))


class CallableOutput(Output):
    """Gives each line of a rank to a function of the caller, on one thread that is not the caller's.

    A carriage return ends a line, too: a progress bar is one line for each time it is drawn.
    """

    def __init__(self, take_line: TakeLine) -> None:
        super().__init__()
        self._take_line = take_line
        self._pending: dict[tuple[int, str], bytes] = {}  # the line that has no end yet

    def show(self, rank: int, stream: str, data: bytes) -> None:
        parts = (self._pending.pop((rank, stream), b"") + data).splitlines(keepends=True)
        if parts and not parts[-1].endswith(b"\n"):  # also after \r: the \n that belongs to it may be on its way
            self._pending[rank, stream] = parts.pop()
        for part in parts:
            self._take(rank, stream, part)

    def finish(self) -> None:
        for (rank, stream), part in self._pending.items():
            self._take(rank, stream, part)
        self._pending.clear()

    def _take(self, rank: int, stream: str, part: bytes) -> None:
        line = part.rstrip(b"\r\n").decode("utf-8", "replace")
        if line or part.endswith(b"\n"):  # a bar begins with the \r that leaves what was drawn before
            self._take_line(rank, stream, line)
