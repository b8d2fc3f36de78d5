"""Run a function of the notebook on ranks: the launcher's own agent and supervision, results by rank."""

from __future__ import annotations

import linecache
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from launcher.agent.scratch import CALL, Scratch
from launcher.base import env
from launcher.base.errors import JobError, LauncherError, UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.signals import NOTICE_SIGNAL
from launcher.base.units import format_duration
from launcher.cluster.cluster import Cluster, Host, place
from launcher.cluster.devices import local_device_tokens
from launcher.cluster.filters import select
from launcher.compat import AUTO
from launcher.fleet.signals import STACKS_SIGNAL, SignalQueue
from launcher.job.controller import Controller
from launcher.job.display import Display
from launcher.job.outcome import Failure, RunReport
from launcher.job.plan import DEFAULT_GRACE_S, Command, JobPlan, new_job_id
from launcher.notebook import rank as rank_module
from launcher.notebook.output import CellOutput
from launcher.notebook.pickling import dumps
from launcher.transport.local import LocalTransport

_T = TypeVar("_T")


def run(
    fn: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_gpus: int = 2,
    *,
    log_dir: str | os.PathLike[str] | None = None,
    grace_s: float = DEFAULT_GRACE_S,
) -> list[_T]:
    """Run `fn(*args, **kwargs)` on `num_gpus` ranks of this machine and return what each returned, by rank.

    Every rank is a fresh process with the environment of `launch`; its output appears in the cell as it comes. The
    first rank that fails stops the others. log_dir: parent of the run folder, default as for `launch`. grace_s:
    seconds between SIGTERM and SIGKILL.

    Raises: JobError when a rank failed, with its traceback, and its exception as the cause where that can be
    pickled; UsageError when the call cannot be sent or there are fewer GPUs; KeyboardInterrupt after an interrupt,
    when all ranks have ended.
    """
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            "run() works in the main thread only: the interrupt button is a signal, and signals arrive there",
            hint="call it from a cell",
        )
    if not isinstance(args, Sequence) or isinstance(args, str):
        raise UsageError(f"args is {args!r}, no tuple of arguments", hint="one argument x is given as (x,)")
    cluster = _local_cluster(num_gpus)
    call = _call_file(fn, args, kwargs or {})
    job_id = new_job_id()
    scratch = Scratch(job_id, CALL)
    try:
        folder = Path(scratch.path)
        (folder / rank_module.CALL_FILE).write_bytes(call)
        report = _supervise(_plan(cluster, job_id, scratch.path, log_dir, grace_s))
        if report.failure is not None:
            raise _job_error(report, report.failure) from _remote_error(folder, report.failure)
        return [_result(folder, rank) for rank in range(report.world_size)]
    finally:
        scratch.remove()


def _local_cluster(num_gpus: int) -> Cluster:
    """Return this machine with `num_gpus` slots: GPUs where there are any, else CPU ranks."""
    if num_gpus < 1:
        raise UsageError(f"num_gpus is {num_gpus}", hint="give 1 or more")
    num_devices = len(local_device_tokens(os.environ))
    slots = tuple(range(num_devices or num_gpus))
    return select(Cluster((Host("localhost", slots),)), num_gpus=num_gpus)


def _call_file(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return what `launcher.notebook.rank` reads: where to import from and the cells' sources, then the call."""
    search_path = [os.path.abspath(folder) for folder in sys.path]
    # Cells have no file. With their sources the ranks' tracebacks show lines, and inspect.getsource works there.
    sources = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    return pickle.dumps((search_path, sources)) + dumps(
        (fn, tuple(args), dict(kwargs)), "the function or its arguments"
    )


def _plan(
    cluster: Cluster, job_id: str, folder: str, log_dir: str | os.PathLike[str] | None, grace_s: float
) -> JobPlan:
    return JobPlan(
        job_id=job_id,
        placement=place(cluster),
        command=Command("internal", rank_module.__name__, (folder,)),
        cwd=os.getcwd(),
        run_folder=Path(log_dir or os.environ.get(env.LOG_DIR.name) or "runs") / job_id,
        master_addr="127.0.0.1",
        master_port=None,
        transports={0: "local"},
        forwarded_env={},
        device_tokens=local_device_tokens(os.environ),
        grace_s=grace_s,
        engine=os.environ.get(env.ENGINE.name, AUTO),
    )


def _supervise(plan: JobPlan) -> RunReport:
    """Run the plan with its output in the cell. Raises: KeyboardInterrupt."""
    transport, output = LocalTransport(), CellOutput()
    display, signals = Display(output), SignalQueue(plan.stop_signals, (STACKS_SIGNAL, NOTICE_SIGNAL))
    with signals.listening():
        try:
            report = Controller(plan, lambda _: transport, display, signals).run()
        except LauncherError as error:
            if error.exit_code == ExitCode.INTERRUPTED:
                raise KeyboardInterrupt from None
            raise
        finally:
            transport.close()
            display.put(output.finish)
            display.close(signals, lambda: None)
    if report.interrupted_by == "SIGINT":
        raise KeyboardInterrupt
    if report.interrupted_by is not None:
        # The controller has ended the ranks; what the signal means to this process is not its business.
        signal.raise_signal(signal.Signals[report.interrupted_by])
        raise JobError(f"{report.interrupted_by} ended the ranks", exit_code=report.exit_code)
    return report


def _job_error(report: RunReport, failure: Failure) -> JobError:
    lines = failure.traceback.rstrip() or "\n".join(failure.last_lines)
    if failure.rank is None:
        return JobError(failure.reason, exit_code=report.exit_code, hint=failure.hint, details=lines)
    return JobError(
        f"failed {format_duration(failure.after_s)} after start: {failure.reason}",
        exit_code=report.exit_code,
        where=f"rank {failure.rank}",
        hint=f"complete output: {failure.log}",
        details=lines,
    )


def _remote_error(folder: Path, failure: Failure) -> Exception | None:
    """Return the exception of the rank, None where it left none or it cannot be rebuilt here."""
    try:
        error = pickle.loads((folder / rank_module.ERROR_FILE.format(failure.rank)).read_bytes())
    except Exception:  # noqa: BLE001  # rebuilding an exception runs its own __init__
        return None
    return error if isinstance(error, Exception) else None


def _result(folder: Path, rank: int) -> Any:
    path = folder / rank_module.RESULT_FILE.format(rank)
    try:
        return pickle.loads(path.read_bytes())
    except FileNotFoundError:
        raise JobError(
            "ended with exit code 0 before the function returned",
            exit_code=ExitCode.FAILURE,
            where=f"rank {rank}",
            hint="return from the function instead of leaving the process with sys.exit() or os._exit()",
        ) from None
    except Exception as error:
        raise JobError(
            f"its result cannot be rebuilt here: {error}",
            exit_code=ExitCode.FAILURE,
            where=f"rank {rank}",
            hint="return plain data or tensors on the CPU",
        ) from error
