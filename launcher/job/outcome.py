"""How a run ended, as data. The words are the command line's."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from launcher.base.exit_codes import ExitCode
from launcher.base.private_files import write_private


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

    def save(self, folder: Path, earlier: Sequence[RunReport] = ()) -> None:
        """Write the report as `report.json`, whole or not at all. Raises: OSError.

        earlier: the reports of the tries before this one, for the report of a whole job.
        """
        tries = [report.summary() for report in (*earlier, self)]
        text = json.dumps({**dataclasses.asdict(self), "tries": tries}, indent=2) + "\n"
        write_private(folder / "report.json", text.encode(), is_durable=True)

    def warnings(self) -> list[str]:
        """Return what may be left on hosts, in words."""
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


def shell_code(status: int) -> int:
    """Turn an exit code or minus a signal number into what a shell shows."""
    return status if status >= 0 else 128 - status


def signal_name(status: int) -> str | None:
    """Return the name of the signal that ended a process, None when none did."""
    if status >= 0:
        return None
    try:
        return signal.Signals(-status).name
    except ValueError:  # real-time signals have no names
        return f"signal {-status}"


def describe_status(status: int, record: dict[str, Any], oom: str | None = None) -> str:
    """Return in a few words how a rank ended."""
    name = signal_name(status)
    if name is not None:
        return f"killed by {name}, out of memory" if oom else f"killed by {name}"
    if record.get("type") == "SystemExit" and not str(record.get("message")).isdigit():
        return f"exit code {status}: {record.get('message')}"
    return f"exit code {status}"
