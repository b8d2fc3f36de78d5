"""The jobs this user has started, one small file each, so that they can be found again.

`${XDG_STATE_HOME:-~/.local/state}/launch/jobs/ID.json`, readable by the user only: a command line may hold secrets. The
folder may be on a disk that several machines share, so that an entry names its machine, and a process is known by
boot, pid and start time: a pid alone may be another process by now. A running job touches its file every minute, by
which other machines know that its launcher lives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base import env
from launcher.base.errors import LauncherError, UsageError, did_you_mean
from launcher.base.exit_codes import ExitCode
from launcher.base.folders import home_folder
from launcher.base.private_files import make_private_folder, write_private
from launcher.base.processes import identity
from launcher.base.secrets import mask_arguments
from launcher.base.timeouts import timeouts
from launcher.plan.plan import JobPlan, Settings

_KEPT_S = 7 * 24 * 3600.0  # how long entries of jobs that have ended, or are lost, are kept
_TOUCH_INTERVAL_S = 60.0
_SILENCE_S = 15 * 60.0  # of a job on another machine, whose clock may differ, before it is lost
_BEYOND_NUMBERS = 1e11  # no pid, and no time a calendar has
_MAX_NAMED = 5  # candidates an error lists


@dataclass(frozen=True)
class JobEntry:
    """One job; times in seconds since the epoch."""

    job_id: str
    machine: str  # host name of the launcher
    pid: int  # of the launcher
    process: str  # boot and start time of that process, see `process_identity`
    started_s: float
    hosts: tuple[str, ...]
    num_ranks: int
    command: tuple[str, ...]
    cwd: str
    run_folder: str
    grace_s: float
    stop_signals: tuple[int, ...] = Settings.stop_signals  # that the launcher ends its ranks for
    ended_s: float | None = None
    exit_code: int | None = None
    slurm_job: str | None = None  # number of the Slurm job that the launcher runs in
    run_id: str | None = None  # the name of `--job-id`, which the launchers of all nodes have in common
    touched_s: float = 0.0  # when the file was last written or touched; in no file

    @property
    def is_here(self) -> bool:
        """Whether the launcher runs, or ran, on this machine."""
        return self.machine == os.uname().nodename

    @property
    def state(self) -> str:
        """One of "running", "ended", "lost" (the launcher has gone without a word), "elsewhere" (another machine)."""
        if self.ended_s is not None:
            return "ended"
        if not self.is_here:
            return "elsewhere" if time.time() - self.touched_s < _SILENCE_S else "lost"
        return "running" if process_identity(self.pid) == self.process else "lost"


@dataclass
class Registration:
    """What the entry of a running job still has to learn."""

    exit_code: int = ExitCode.FAILURE


@contextlib.contextmanager
def registered(plan: JobPlan, warn: Callable[[str], None]) -> Iterator[Registration]:
    """Keep the entry of a job while its block runs; at the end it says when, and with which exit code.

    A folder that cannot be written does not fail the job: `warn` gets the reason.
    """
    registration = Registration()
    entry = JobEntry(
        job_id=plan.job_id,
        machine=os.uname().nodename,
        pid=os.getpid(),
        process=process_identity(os.getpid()) or "",
        started_s=time.time(),
        hosts=tuple(node.host.name for node in plan.placement.nodes),
        num_ranks=len(plan.placement.ranks),
        command=(plan.command.target, *mask_arguments(plan.command.arguments)),
        cwd=plan.cwd,
        run_folder=str(Path(plan.cwd, plan.run_folder)),
        grace_s=plan.grace_s,
        stop_signals=plan.stop_signals,
        slurm_job=os.environ.get(env.SLURM_JOB_ID.name),
        run_id=plan.run_id,
    )
    problem = _unless_stalled(lambda: _why_not_written(entry))
    if problem is not None:
        warn(f"{problem}; launch ps will not show this job")
    is_over = threading.Event()
    threading.Thread(target=_keep_touching, args=(entry, is_over), name="registry", daemon=True).start()
    try:
        yield registration
    except LauncherError as error:
        registration.exit_code = error.exit_code
        raise
    finally:
        is_over.set()
        ended = dataclasses.replace(entry, ended_s=time.time(), exit_code=int(registration.exit_code))
        if problem is None:
            problem = _unless_stalled(lambda: _why_not_written(ended))
            if problem is not None:
                warn(f"{problem}; launch ps will not show how this job ended")
            else:
                _unless_stalled(lambda: _drop_old(time.time() - _KEPT_S))


def jobs_folder() -> Path:
    """Return where the entries are; it may not exist. Raises: UsageError for a user without a home folder."""
    state = os.environ.get(env.XDG_STATE_HOME.name, "")
    # The XDG rules: what is not absolute is ignored.
    if os.path.isabs(state):
        return Path(state, "launch", "jobs")
    home = home_folder()
    if home is None:
        raise UsageError("this user has no home folder", hint=f"set {env.XDG_STATE_HOME.name}")
    return home / ".local" / "state" / "launch" / "jobs"


def all_jobs() -> list[JobEntry]:
    """Return every entry, the one that started last comes last; files that are not entries are left out."""
    try:
        paths = list(jobs_folder().glob("*.json"))
    except OSError:
        return []
    entries = [entry for path in paths if (entry := _read(path)) is not None]
    return sorted(entries, key=lambda entry: entry.started_s)


def latest(entry: JobEntry) -> JobEntry:
    """Return what is known of a job now; the same where its entry has been dropped."""
    return _read(_file_of(entry)) or entry


def find_job(text: str) -> JobEntry:
    """Return the job whose id is `text`, the one of this machine that runs under that `--job-id`, or the only one
    whose id begins with it. Raises: UsageError.
    """
    jobs = {entry.job_id: entry for entry in all_jobs()}
    named = [job_id for job_id, entry in jobs.items() if entry.run_id == text and entry.state == "running"]
    begun = [job_id for job_id in jobs if text and job_id.startswith(text)]
    matches = [text] if text in jobs else named or begun
    if len(matches) == 1:
        return jobs[matches[0]]
    if matches:
        more = " ..." if len(matches) > _MAX_NAMED else ""
        shown = ", ".join(matches[-_MAX_NAMED:]) + more
        raise UsageError(f'"{text}" is the beginning of {len(matches)} jobs', hint=f"give more of one: {shown}")
    near = did_you_mean(text, jobs)
    raise UsageError(f'no job "{text}"', where=str(jobs_folder()), hint=near or "launch ps shows the jobs there are")


def find_run(text: str) -> tuple[Path, JobEntry | None]:
    """Return the run folder that `text` is the path of, else that of the job it names, as `find_job` finds it.

    Raises: UsageError, also where the folder is not there.
    """
    folder = Path(text)
    if folder.is_dir() and (os.sep in text or any(folder.glob("*.jsonl"))):
        return folder, None
    entry = find_job(text)
    if not Path(entry.run_folder).is_dir():
        why = "it was removed" if entry.is_here else f"it is on {entry.machine}"
        raise UsageError(f"the run folder of {entry.job_id} is not here", where=entry.run_folder, hint=why)
    return Path(entry.run_folder), entry


def process_identity(pid: int) -> str | None:
    """Return boot id and start time of a living process, which no other ever has; None when there is none."""
    start_ticks = identity(pid).partition(":")[2]
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{start_ticks}" if start_ticks else None
    return None


def ask_to_end(entry: JobEntry) -> bool:
    """Send the job's launcher a signal for which it ends its ranks; False when that process has gone.

    A stopped one (Ctrl-Z) is continued: it would keep the signal until then. Raises: LauncherError.
    """
    # SIGTERM if it is one of them; SIGHUP last, which nohup has a launcher ignore.
    by_use = sorted(entry.stop_signals, key=lambda number: (number != signal.SIGTERM, number == signal.SIGHUP))
    if not send_signal(entry, by_use[0] if by_use else signal.SIGTERM):
        return False
    send_signal(entry, signal.SIGCONT)
    return True


def send_signal(entry: JobEntry, number: int) -> bool:
    """Send a signal to the job's launcher; False when that process has gone.

    Raises: LauncherError when it belongs to another user.
    """
    if process_identity(entry.pid) != entry.process:
        return False
    try:
        os.kill(entry.pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        raise LauncherError(f"job {entry.job_id} belongs to another user", hint="ask its owner") from None
    return True


def _unless_stalled(call: Callable[[], str | None]) -> str | None:
    """Return what `call` returns, or that the disk does not answer: a job waits for it a while, and no longer."""
    answers: list[str | None] = []
    thread = threading.Thread(target=lambda: answers.append(call()), name="registry", daemon=True)
    thread.start()
    thread.join(timeouts().disk_stall_s)
    return answers[0] if answers else "the disk with the list of jobs does not answer"


def _why_not_written(entry: JobEntry) -> str | None:
    """Write an entry, whole or not at all; return why it could not be done."""
    try:
        folder = jobs_folder()
        make_private_folder(folder)
        values = dataclasses.asdict(entry)
        del values["touched_s"]
        write_private(_file_of(entry), json.dumps(values).encode())
    except UsageError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


def _file_of(entry: JobEntry) -> Path:
    return jobs_folder() / f"{entry.job_id}.json"


def _keep_touching(entry: JobEntry, is_over: threading.Event) -> None:
    """Say on a shared disk that this launcher lives. On a thread of its own, which such a disk may hold up."""
    while not is_over.wait(_TOUCH_INTERVAL_S):
        with contextlib.suppress(OSError, UsageError):
            os.utime(_file_of(entry))


def _read(path: Path) -> JobEntry | None:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        values.update({name: tuple(value) for name, value in values.items() if isinstance(value, list)})
        entry = JobEntry(**values | {"touched_s": path.stat().st_mtime})
        return entry if entry.job_id == path.stem and _is_sound(entry) else None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # half a file, or another version's
        return None


def _is_sound(entry: JobEntry) -> bool:
    """Return whether what is computed with is of the right type: a file may have been edited. Raises: TypeError."""
    if not all(isinstance(number, int) and 0 < number < signal.NSIG for number in entry.stop_signals):
        return False
    numbers = (entry.pid, entry.started_s, entry.grace_s, entry.ended_s or 0.0)
    if not all(0 <= number < _BEYOND_NUMBERS for number in numbers):  # nan is not either
        return False
    texts = (entry.machine, entry.process, entry.run_folder, *entry.hosts, *entry.command, entry.slurm_job or "")
    return all(isinstance(n, (int, float)) for n in numbers) and all(isinstance(text, str) for text in texts)


def _drop_old(before_s: float) -> None:
    """Remove entries of jobs that have ended, or are lost, last touched before a time, unless that fails."""
    with contextlib.suppress(OSError, UsageError):
        for path in jobs_folder().glob("*.json"):
            if path.stat().st_mtime < before_s:
                entry = _read(path)
                if entry is None or entry.state in ("ended", "lost"):
                    path.unlink(missing_ok=True)
