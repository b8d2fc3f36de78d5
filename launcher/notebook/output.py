"""The output of ranks in a cell: sys.stdout and sys.stderr, which a notebook replaces by streams of its own."""

from __future__ import annotations

import io
import sys
import time

from launcher.cli.console.lines import MixedLines
from launcher.job.outcome import Failure, RunReport
from launcher.job.plan import JobPlan


def write(stream: str, text: str) -> None:
    """Write to the cell's "stdout" or "stderr", live."""
    target = sys.stdout if stream == "stdout" else sys.stderr
    target.write(text)
    # A kernel's stream shows within 0.2 s what it has; flushed by hand for every line it would be the bottleneck.
    if isinstance(target, io.TextIOWrapper):
        target.flush()


class CellOutput:
    """Shows a run in a cell as `launch` shows it on a console; implements the job's `Watcher`."""

    def __init__(self) -> None:
        self._lines = {"stdout": MixedLines(), "stderr": MixedLines()}

    def planned(self, plan: JobPlan) -> None:
        num_ranks = plan.placement.world_size
        write("stdout", f"job {plan.job_id} · {num_ranks} rank{'s'[: num_ranks > 1]} · logs {plan.run_folder}/\n")

    def waiting(self, what: str) -> None:
        write("stdout", f"waiting for {what}\n")

    def started(self, rank: int) -> None:
        """Show nothing: a cell keeps every line for ever, and the headline has said how many ranks there are."""

    def progress(self, rank: int, step: int, loss: float | None) -> None:
        """Show nothing: the ranks' own lines say it, and a line a second for each rank would bury them."""

    def ended(self, rank: int, status: int) -> None:
        """Show nothing: the end of the whole run is shown, with the one failure."""

    def raised(self, failure: Failure) -> None:
        what = failure.traceback or failure.reason
        write("stderr", f"! rank {failure.rank} has failed but has not exited:\n{what.rstrip()}\n")

    def stopping(self, why: str) -> None:
        write("stdout", f"{why}\n")

    def restarting(self, plan: JobPlan, report: RunReport) -> None:
        why = report.failure.reason if report.failure else f"exit code {report.exit_code}"
        write("stdout", f"restart {plan.num_failures} of {plan.max_restarts} after: {why}\n")

    def stacks(self, text: str, path: str) -> None:
        write("stderr", f"{text}\nstacks of all ranks: {path}\n")

    def warning(self, text: str) -> None:
        write("stderr", f"! {text}\n")

    def output(self, rank: int, stream: str, data: bytes) -> None:
        self._show(stream, self._lines[stream].feed(rank, f"[{rank}] ".encode(), data))

    def suspending(self) -> None:
        """Show nothing: a kernel has no Ctrl-Z."""

    def continuing(self, away_s: float) -> None:
        """Show nothing, as for `suspending`."""

    def idle(self) -> None:
        now_s = time.monotonic()
        for stream, lines in self._lines.items():
            self._show(stream, lines.settle(now_s))

    def finish(self) -> None:
        """Show what had no line end."""
        for stream, lines in self._lines.items():
            self._show(stream, lines.flush())

    def _show(self, stream: str, data: bytes) -> None:
        if data:
            write(stream, data.decode("utf-8", "replace"))
