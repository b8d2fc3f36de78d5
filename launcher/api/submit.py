"""`launcher.submit`: a function or a script as a batch job of Slurm, as submitit's `executor.submit` is used.

The folder of a job is on a disk that the nodes share, readable by its owner only. It holds `request` and, once the job
has ended, `ended`, both pickles; `number`, Slurm's own; the batch script, its log `slurm.out` (a link to what
`Sbatch(output=...)` gives), and the ranks' logs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
import re
import stat
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launcher.api.outcome import Ended, JobTimeout
from launcher.api.output import ConsoleOutput
from launcher.api.parameters import Options, Parameters, StrPath, command_for, in_python_words
from launcher.api.run import execute
from launcher.base import env as variables
from launcher.base.errors import JobError, LauncherError, UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.folders import working_folder
from launcher.base.private_files import make_private_folder, write_private
from launcher.base.timeouts import timeouts
from launcher.base.units import format_duration
from launcher.plan.plan import new_job_id
from launcher.slurm import queue
from launcher.slurm.script import Sbatch, job_name_of, render_script
from launcher.transport.command import own_argv

_THIS_MODULE = "launcher.api.submit"  # the batch script runs its `main` on the first node of the job
REQUEST_FILE, ENDED_FILE, NUMBER_FILE, SCRIPT_FILE, LOG_FILE = "request", "ended", "number", "batch.sh", "slurm.out"
_LOOK_INTERVAL_S = 0.5  # between two looks for `ended`
_FORGOTTEN = "FORGOTTEN"  # Slurm keeps a job that has ended for some minutes
_ENDED_BY_SLURM = ("CANCELLED", "TIMEOUT", "PREEMPTED")
_LOG_LINES = 20


def submit(
    target: Callable[..., Any] | StrPath,
    /,
    *args: Any,
    slurm: Sbatch,
    ranks: int | None = None,
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    log_dir: StrPath | None = None,
    options: Options = Options(),  # noqa: B008  # immutable
) -> SlurmJob:
    """Write the batch script that runs a function or a script on ranks of a Slurm job, submit it, and return the job.

    slurm: what the job asks Slurm for; the ranks of a node are its GPUs. ranks: of each node without GPUs. The others
    mean what they mean to `launcher.run`. The working directory and `log_dir` must be on a disk that the nodes share.

    Raises: UsageError when the call is wrong or cannot be sent, and with what sbatch says; TransportError without it.
    """
    if not isinstance(slurm, Sbatch):
        raise UsageError(f"slurm is a {type(slurm).__name__}", hint='such as slurm=launcher.Sbatch(time="20:00:00")')
    if slurm.array is not None or slurm.container_image is not None:
        raise UsageError(
            "an array makes several jobs, and a container has a Python of its own: neither can give results back",
            hint="call submit() several times, or use `launch sbatch`",
        )
    values: dict[str, Any] = {"num_gpus": ranks, "env": env or {}, "max_restarts": max_restarts, "options": options}
    with in_python_words():
        parameters = Parameters(command=command_for(target, args), **values)
    folder = Path(working_folder(), log_dir or os.environ.get(variables.LOG_DIR.name) or "runs", new_job_id())
    name = job_name_of(getattr(target, "__name__", None) or str(target))
    output = str(Path(working_folder(), slurm.output or folder / LOG_FILE))
    batch = dataclasses.replace(slurm, job_name=slurm.job_name or name, output=output)
    script = render_script(batch, [str(folder)], program=own_argv(_THIS_MODULE))
    try:
        make_private_folder(folder)
        write_private(folder / REQUEST_FILE, pickle.dumps(parameters))
        write_private(folder / SCRIPT_FILE, script.encode())
        write_private(folder / NUMBER_FILE, str(queue.submit(script)).encode())
    except OSError as error:
        raise LauncherError(
            f"the folder of the job cannot be written: {error.strerror}",
            where=str(error.filename),
            hint="choose another with log_dir=",
        ) from None
    return SlurmJob(folder)


class SlurmJob:
    """A submitted job, from its folder: `SlurmJob(folder)` finds it again in another process, too.

    Its result is unpickled, which runs code of whoever can write to the folder: you alone, or the folder is refused.
    """

    def __init__(self, folder: StrPath) -> None:
        """Raises: UsageError when this is not the folder of a job, or others can write to it."""
        self.folder = Path(working_folder(), folder)
        if not (self.folder / NUMBER_FILE).is_file():
            raise UsageError("this is not the folder of a submitted job", where=str(self.folder))
        found = self.folder.stat()
        if found.st_uid not in (0, os.getuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UsageError(
                "other users can write to this folder, and a result is a pickle, which may run code when read",
                where=str(self.folder),
                hint="use only folders that launcher.submit has made for you, and do not share them",
            )

    def __repr__(self) -> str:
        return f"SlurmJob({str(self.folder)!r})"

    @property
    def job_id(self) -> int:
        """Slurm's number of the job."""
        return int((self.folder / NUMBER_FILE).read_text())

    def state(self) -> str:
        """Return Slurm's word for the state: "PENDING", "RUNNING", "COMPLETED", ...; "FORGOTTEN" some time later.

        Raises: TransportError when Slurm does not answer.
        """
        state = queue.job_state(self.job_id)
        return _FORGOTTEN if state is None else state.state

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the job has ended; False when that takes longer than `timeout_s`.

        Raises: TransportError when Slurm has not answered for ten minutes.
        """
        return self._wait(timeout_s, self._watch())

    def _wait(self, timeout_s: float | None, watch: queue.JobWatch) -> bool:
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        polls = queue.poll_intervals()
        ask_at_s = time.monotonic()
        while not self._has_ended():
            now_s = time.monotonic()
            if now_s >= ask_at_s:
                ask_at_s = now_s + next(polls)
                state = watch.state()
                if state is None or state.is_over:
                    return True
            if end_s is not None and now_s >= end_s:
                return False
            time.sleep(_LOOK_INTERVAL_S if end_s is None else min(_LOOK_INTERVAL_S, max(0.0, end_s - now_s)))
        return True

    def result(self, timeout_s: float | None = None) -> Any:
        """Wait, and return what `launcher.run` would return: results by rank, or the outcome of a script.

        Raises: what `launcher.run` raises; JobError when Slurm ended the job; JobTimeout after `timeout_s`, and the job
        continues.
        """
        watch = self._watch()
        if not self._wait(timeout_s, watch):
            raise JobTimeout(
                f"the job has not ended after {format_duration(timeout_s or 0.0)}, and continues",
                where=f"Slurm job {self.job_id}",
                hint="wait longer, or end it with cancel()",
            )
        end_s = time.monotonic() + timeouts().shared_disk_s
        while not self._has_ended():
            state = watch.state()
            has_run_to_its_end = state is None or state.state in ("COMPLETED", "FAILED")
            if not has_run_to_its_end or time.monotonic() > end_s:
                raise self._ended_by_slurm(state)
            time.sleep(_LOOK_INTERVAL_S)
        ended: Ended | LauncherError = pickle.loads((self.folder / ENDED_FILE).read_bytes())
        if isinstance(ended, LauncherError):
            raise ended
        if ended.report.failure is not None and ended.report.failure.signal_name == "SIGTERM":
            # scancel ends ranks and launcher at once: either may be the first to notice, and Slurm takes a while to.
            state = watch.state()
            while state is not None and not state.is_over and time.monotonic() < end_s:
                time.sleep(_LOOK_INTERVAL_S)
                state = watch.state()
            if state is not None and state.state in _ENDED_BY_SLURM:
                raise self._ended_by_slurm(state)
        parameters: Parameters = pickle.loads((self.folder / REQUEST_FILE).read_bytes())
        return ended.results() if parameters.is_call else ended.outcome()

    def cancel(self) -> None:
        """End the job, or take it out of the queue. Raises: TransportError."""
        queue.cancel(self.job_id)

    def stdout(self, rank: int = 0) -> str:
        """Return what a rank has written so far, stdout and stderr in the order they came; "" before it has started."""
        logs = sorted(self.folder.glob(f"**/rank_{rank}.log"), key=lambda path: path.stat().st_mtime)
        return logs[-1].read_text(errors="replace") if logs else ""

    def _has_ended(self) -> bool:
        """Whether the job has left how it ended."""
        queue.refresh(self.folder)
        return (self.folder / ENDED_FILE).exists()

    def _watch(self) -> queue.JobWatch:
        where = f"Slurm job {self.job_id}"
        return queue.JobWatch(self.job_id, lambda text: logging.getLogger(__name__).warning("%s: %s", where, text))

    def _ended_by_slurm(self, state: queue.JobState | None) -> JobError:
        log = self._log(state)
        lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:] if log.is_file() else []
        return JobError(
            f"the job ended as {_FORGOTTEN if state is None else state.state} and left no result",
            exit_code=(state.exit_code if state is not None else 0) or ExitCode.FAILURE,
            where=f"Slurm job {self.job_id}",
            hint=f"its log is {log}",
            details="\n".join(lines),
        )

    def _log(self, state: queue.JobState | None) -> Path:
        """Return where the batch script writes: as it has left it, else as Slurm says, else as given."""
        if (log := self.folder / LOG_FILE).exists():
            return log.resolve()
        if state is not None and state.log is not None:
            return state.log
        with contextlib.suppress(OSError):
            script = (self.folder / SCRIPT_FILE).read_text()
            if given := re.search(r'^#SBATCH --output="?(.*?)"?$', script, re.MULTILINE):
                return Path(given[1])
        return log


def main() -> int:
    """Run the request of a batch job, leave how it ended, and return the exit code: what the batch script runs.

    The argument of the process is the folder of the job.
    """
    folder = Path(sys.argv[1])
    parameters: Parameters = pickle.loads((folder / REQUEST_FILE).read_bytes())
    log = folder / LOG_FILE
    with contextlib.suppress(OSError):
        if log.is_symlink():  # of the time before, when the job comes back from the queue
            log.unlink()
        if not log.exists():
            log.symlink_to(os.readlink("/proc/self/fd/1"))
    os.environ.pop(variables.JOB_ID.name, None)  # of a job that has submitted this one: the nodes here are ours
    left: Ended | LauncherError
    try:
        with in_python_words():
            left = ended = execute(parameters, ConsoleOutput(), folder.name, _run_folder(folder))
        code = ended.report.exit_code
    except LauncherError as error:
        sys.stderr.write(f"{error}\n")
        left, code = error, error.exit_code
    if code != ExitCode.REQUEUE:  # else the job goes back into the queue, and has not ended
        write_private(folder / ENDED_FILE, pickle.dumps(left), is_durable=True)
    return int(code)


def _run_folder(folder: Path) -> Path:
    """Return where logs go: each time that the job comes back from the queue, to a folder of their own."""
    num_requeues = os.environ.get(variables.SLURM_RESTART_COUNT.name, "0")
    return folder if num_requeues == "0" else folder / f"requeue_{num_requeues}"
