"""How a run ended, as data. The words are the command line's."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Failure:
    """One rank that failed, or one host that was lost."""

    host: str
    rank: int | None  # None: the host itself
    pid: int | None
    exit_code: int  # as a shell shows it: 128 + signal when killed
    signal_name: str | None
    after_s: float  # since the start of the run
    reason: str  # "exit code 3", "killed by SIGKILL", "the connection was lost"
    traceback: str  # of the error record, "" when there is none
    last_lines: tuple[str, ...]  # of the rank's output, for failures without a traceback
    log: str | None
    max_rss_bytes: int | None = None  # the most memory the rank's process held
    oom: str | None = None  # what shows that the kernel ended it for lack of memory


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
    unconfirmed_hosts: tuple[str, ...]  # lost hosts that could not be asked whether anything is left

    def save(self, path: Path) -> None:
        """Write the report as JSON, whole or not at all. Raises: OSError."""
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")
        os.replace(temporary, path)


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
    """Say in a few words how a rank ended."""
    name = signal_name(status)
    if name is not None:
        return f"killed by {name}, out of memory" if oom else f"killed by {name}"
    if record.get("type") == "SystemExit" and not str(record.get("message")).isdigit():
        return f"exit code {status}: {record.get('message')}"
    return f"exit code {status}"
