"""Slurm's own commands, as far as they are needed: submit a script, ask about a job."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import TransportError, UsageError
from launcher.base.timeouts import timeouts
from launcher.base.units import format_duration

_UNKNOWN = "UNKNOWN"  # Slurm has not answered yet
_LIVE_STATES = {
    _UNKNOWN,
    "CONFIGURING", "COMPLETING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING",
    "RESV_DEL_HOLD", "RUNNING", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "SUSPENDED",
}  # fmt: skip


class NoAnswerError(TransportError):
    """Slurm's controller did not answer, or refused to."""


@dataclass(frozen=True)
class JobState:
    """What Slurm says of a job."""

    state: str  # "PENDING", "RUNNING", "COMPLETED", ...
    exit_code: int  # of the batch script, 128+signal when it was killed; 0 as long as it has not ended
    log: Path | None
    reason: str

    @property
    def is_over(self) -> bool:
        return self.state not in _LIVE_STATES


def submit(script: str, options: Sequence[str] = ()) -> int:
    """Submit a batch script and return the job's number.

    options: of sbatch; they win over the script's own lines. Raises: UsageError with sbatch's reason, TransportError
    when there is no sbatch.
    """
    output = _run(["sbatch", "--parsable", *options], script)
    match = re.match(r"(\d+)", output.strip().splitlines()[-1] if output.strip() else "")
    if match is None:
        raise TransportError(f'sbatch answered "{output.strip()}", which is not a job number')
    return int(match[1])


def cancel(job_id: int) -> None:
    """End a job, or take it out of the queue. Raises: TransportError."""
    _run(["scancel", str(job_id)])


def poll_intervals() -> Iterator[float]:
    """Yield how long to wait, in seconds, before Slurm's controller is asked the next time: it serves everybody."""
    interval_s = 1.0
    while True:
        yield interval_s
        interval_s = min(interval_s * 1.5, 30.0)


def job_detail(job_id: str) -> str:
    """Return what `scontrol show job -d` prints. Raises: TransportError."""
    return _run(["scontrol", "show", "job", "-d", job_id])


def job_state(job_id: int) -> JobState | None:
    """Return the state of a job, None for one that Slurm has forgotten. Raises: TransportError."""
    try:
        text = job_detail(str(job_id))
    except NoAnswerError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    code, _, number = _value(text, "ExitCode").partition(":")
    number, code = (part if part.isdigit() else "0" for part in (number, code))
    log = _value(text, "StdOut")
    return JobState(
        state=_value(text, "JobState"),
        exit_code=128 + int(number) if int(number) else int(code),
        log=Path(log) if log else None,
        reason=_value(text, "Reason"),
    )


class JobWatch:
    """Asks for the state of one job again and again.

    The controller of a cluster is started anew now and then, and a job of days is waited for: a question without an
    answer ends no wait until there was none for some minutes.
    """

    def __init__(self, job_id: int, say: Callable[[str], object]) -> None:
        """say: gets a line when Slurm begins not to answer."""
        self._job_id = job_id
        self._say = say
        self._last = JobState(_UNKNOWN, 0, None, "None")
        self._silent_since_s: float | None = None  # monotonic

    def state(self) -> JobState | None:
        """Return the state, the last one known while Slurm does not answer; None when it has forgotten the job.

        Raises: TransportError when there are no commands of Slurm, or no answers for too long.
        """
        try:
            state = job_state(self._job_id)
        except NoAnswerError as error:
            now_s, limit_s = time.monotonic(), timeouts().slurm_silence_s
            if self._silent_since_s is None:
                self._silent_since_s = now_s
                self._say(f"Slurm does not answer ({error}); asking again for {format_duration(limit_s)}")
            elif now_s - self._silent_since_s > limit_s:
                raise
            return self._last
        self._silent_since_s = None
        if state is not None:
            self._last = state
        return state


def refresh(folder: Path) -> None:
    """Have the next look into a folder of a shared disk see what other machines have written there.

    A client of NFS remembers for half a minute and longer that a file does not exist; a change of the folder ends that.
    """
    with contextlib.suppress(OSError):  # it is not ours: the client finds out by itself, later
        os.utime(folder)


def _value(text: str, name: str) -> str:
    # A path may hold blanks: StdOut stands alone in its line.
    match = re.search(rf"^\s*{name}=(.*)$" if name == "StdOut" else rf"\b{name}=(\S*)", text, re.MULTILINE)
    return match[1] if match else ""


def _run(command: Sequence[str], text: str | None = None) -> str:
    try:
        result = subprocess.run(
            command,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=timeouts().slurm_query_s,
        )
    except FileNotFoundError:
        raise TransportError(
            f"{command[0]} is not in PATH", hint="run this where Slurm's commands are, on a login node"
        ) from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswerError(f"{command[0]}: {error}") from None
    if result.returncode != 0:
        reason = result.stderr.strip() or f"exit code {result.returncode}"
        kind = NoAnswerError if text is None else UsageError
        raise kind(reason.removeprefix(f"{command[0]}: "), where=command[0])
    return result.stdout
