"""The events of a run: the vocabulary between the controller and whatever shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.base.progress import Told
    from launcher.job.outcome import Failure, RunReport
    from launcher.job.plan import JobPlan


class Watcher:
    """Gets every event of a run, in order, from one thread, see `display`. May block; `progress` alone must not.

    This one shows nothing.
    """

    def planned(self, plan: JobPlan) -> None:
        """All hosts are connected and `plan` is final, its master port included."""

    def waiting(self, what: str) -> None:
        """Nothing has happened for a while; `what` says what is being waited for."""

    def output(self, rank: int, stream: str, data: bytes) -> None:
        """A rank wrote `data` to "stdout" or "stderr"; "result": what a function call came to."""

    def started(self, rank: int) -> None:
        """A rank's process exists."""

    def progress(self, rank: int, told: Told) -> None:
        """A rank has made heartbeats, or something else of what it tells has changed.

        Comes from another thread than the other events, and prints nothing.
        """

    def ended(self, rank: int, status: int) -> None:
        """A rank's process has ended. status: exit code, or minus the signal number."""

    def raised(self, failure: Failure) -> None:
        """A rank has raised an exception but has not exited; it is the root cause as far as that is known now."""

    def stopping(self, why: str) -> None:
        """All ranks are being ended."""

    def restarting(self, plan: JobPlan, report: RunReport) -> None:
        """A run has failed as `report` says, or its ranks saved after a notice, and is started again as `plan`."""

    def stacks(self, text: str, path: str) -> None:
        """The stacks of all ranks, also written to `path`."""

    def warning(self, text: str) -> None:
        """Something is not as it should be; the run continues."""

    def suspending(self) -> None:
        """The user pressed Ctrl-Z: the launcher is about to be suspended, while the ranks run on."""

    def continuing(self, away_s: float) -> None:
        """The launcher runs again after so many seconds."""

    def idle(self) -> None:
        """A moment has passed; called a few times a second, between events."""
