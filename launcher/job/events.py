"""What a run tells whoever shows it: its events, and how it ended, as data. The words are the command line's."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.base.exit_codes import ExitCode
from launcher.base.private_files import write_private

if TYPE_CHECKING:
    from launcher.base.progress import RankProgress
    from launcher.job.collectives import Stuck
    from launcher.journal.totals import Training
    from launcher.journal.verdicts import Verdict
    from launcher.plan.plan import JobPlan
    from launcher.planner.ladder import Advice, EngineFacts


class FailureKind(str, Enum):
    """What has failed."""

    RANK_FAILED = "rank failed"  # it ended with an exit code that is not 0, or was killed
    RANK_HANGS = "rank hangs"
    HOST_LOST = "host lost"  # its agent or the connection to it ended, or its agent broke the protocol
    NOT_STARTED = "ranks not started"  # the agent answered, and could not start the ranks of its host


@dataclass(frozen=True)
class Failure:
    """One rank that failed, or one host that was lost or could not start its ranks."""

    host: str
    rank: int | None = None  # None: the host itself
    pid: int | None = None
    exit_code: int = ExitCode.FAILURE  # as a shell shows it: 128 + signal when killed
    signal_name: str | None = None
    after_s: float = 0.0  # since the start of the run
    reason: str = ""  # "exit code 3", "killed by SIGKILL", "the connection was lost"
    traceback: str = ""  # of the error record, "" when there is none
    last_lines: tuple[str, ...] = ()  # of the rank's output, for failures without a traceback
    log: str | None = None
    max_rss_bytes: int | None = None  # the most memory the rank's process held
    oom: str | None = None  # what shows that the kernel ended it for lack of memory
    away_s: float | None = None  # the launcher itself was suspended for so long, and the host ended its ranks
    kind: FailureKind = FailureKind.RANK_FAILED
    hint: str | None = None  # what the user can do
    memory: str | None = None  # whose memory has ended, "device" or "host"; None: that was not it
    stuck: Stuck | None = None  # of a rank that hangs: the collective that ranks wait in
    engine: EngineFacts | None = None  # what the rank's engine has said of itself; None: it built none

    @property
    def is_start_failure(self) -> bool:
        """Whether the host is there and could not start its ranks."""
        return self.kind is FailureKind.NOT_STARTED


@dataclass(frozen=True)
class RunReport:
    """The end of a run."""

    job_id: str
    exit_code: int
    world_size: int
    duration_s: float
    interrupted_by: str | None  # name of the signal the launcher got
    failure: Failure | None  # the first one; all others followed from it
    num_stopped: int  # ranks that were ended because of it
    stop_s: float  # how long ending them took, without asking lost hosts
    unconfirmed_hosts: tuple[str, ...]  # lost hosts where the clean-up could not be verified
    cleaned_hosts: tuple[str, ...] = ()  # lost hosts where no process with the job's id is left
    left_pids: tuple[tuple[str, tuple[int, ...]], ...] = ()  # host, and processes there that could not be killed
    restart: int = 0  # how often the job had been started before
    advice: Advice | None = None  # what needs less memory, after an end for lack of it
    verdicts: tuple[
        Verdict, ...
    ] = ()  # what was wrong with it: what still was at its end, the worst first, then the rest
    training: Training | None = None  # what the job has trained, over all its starts; None: no rank has told steps

    def save(self, folder: Path, earlier: Sequence[RunReport] = ()) -> None:
        """Write the report as `report.json`, whole or not at all. Raises: OSError.

        earlier: the reports of the tries before this one, for the report of a whole job.
        """
        tries = [report.summary() for report in (*earlier, self)]
        text = json.dumps({**dataclasses.asdict(self), "tries": tries}, indent=2) + "\n"
        write_private(folder / "report.json", text.encode(), is_durable=True)

    def warnings(self) -> list[str]:
        """Say what may be left on hosts."""
        found = [
            f"could not verify clean-up on {host}: its processes exit when the lease expires"
            for host in self.unconfirmed_hosts
        ]
        for host, pids in self.left_pids:
            found.append(f"{host}: processes that SIGKILL did not end: {' '.join(map(str, pids))}")
        return found

    def summary(self) -> dict[str, Any]:
        """Return what the report of a whole job says of each try."""
        own = {name: getattr(self, name) for name in ("restart", "exit_code", "world_size", "duration_s")}
        return own | {name: getattr(self.failure, name, None) for name in ("kind", "host", "rank", "reason")}


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

    def journal(self, rank: int, data: bytes) -> None:
        """The journal of a rank has grown by `data`, which may be cut anywhere."""

    def started(self, rank: int) -> None:
        """A rank's process exists."""

    def progress(self, rank: int, progress: RankProgress) -> None:
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

    def verdict(self, verdict: Verdict) -> None:
        """Something about the training is wrong, has become worse, or, with an `until_step`, is gone."""

    def suspending(self) -> None:
        """The user pressed Ctrl-Z: the launcher is about to be suspended, while the ranks run on."""

    def continuing(self, away_s: float) -> None:
        """The launcher runs again after so many seconds."""

    def idle(self) -> None:
        """A moment has passed; called a few times a second, between events."""


def signal_name(status: int) -> str | None:
    """Return the name of the signal that ended a process, None when none did."""
    if status >= 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:  # real-time signals have no names
        return f"signal {-status}"


def describe_status(status: int, record: dict[str, Any], oom: str | None = None) -> str:
    """Say in a few words how a rank ended."""
    name = signal_name(status)
    if name is not None:
        return f"killed by {name}, out of memory" if oom else f"killed by {name}"
    if record.get("type") == "SystemExit" and not str(record.get("message")).isdigit():
        return f"exit code {status}: {record.get('message')}"
    return f"exit code {status}"
