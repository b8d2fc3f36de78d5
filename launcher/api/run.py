"""`launcher.run`: a function or a script on ranks, as `torchrun`'s `elastic_launch(config, fn)(*args)` is used."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from launcher.api.outcome import Ended, JobTimeout, Outcome
from launcher.api.output import Output, TakeLine, output_for
from launcher.api.parameters import Options, Parameters, StrPath, command_for, in_python_words
from launcher.base.errors import JobError, LauncherError
from launcher.base.units import format_duration
from launcher.fleet.signals import SignalQueue
from launcher.job.display import Display
from launcher.job.events import RunReport
from launcher.job.restart import run_job
from launcher.metrics.export import Exports
from launcher.plan.plan import JobPlan
from launcher.plan.planning import Here, Job

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class _Values(TypedDict, total=False):
        ranks: int | str | None
        hosts: Sequence[str] | None
        hostfile: StrPath | None
        include: str
        exclude: str
        env: Mapping[str, str] | None
        max_restarts: int
        log_dir: StrPath | None
        timeout_s: float | None
        output: Literal["console", "files"] | TakeLine
        options: Options


_T = TypeVar("_T")


@overload
def run(target: Callable[..., _T], /, *args: Any, **values: Unpack[_Values]) -> list[_T]: ...
@overload
def run(target: StrPath, /, *args: Any, **values: Unpack[_Values]) -> Outcome: ...
def run(
    target: Callable[..., Any] | StrPath,
    /,
    *args: Any,
    ranks: int | str | None = None,
    hosts: Sequence[str] | None = None,
    hostfile: StrPath | None = None,
    include: str = "",
    exclude: str = "",
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    log_dir: StrPath | None = None,
    timeout_s: float | None = None,
    output: str | TakeLine = "console",
    options: Options = Options(),  # noqa: B008  # immutable
) -> list[Any] | Outcome:
    """Run a function, or the script at a path, on ranks; return what the function returned on each, or the outcome.

    Every rank is a fresh process with the environment of `launch`. args: of the function, or of the script. They and
    the results are pickled, at most 1 GiB each; what cannot be imported, such as a lambda, needs cloudpickle.
    The first rank that fails ends all others. Works on any thread; two calls at once are two jobs.

    ranks: on each host, or "gpu", "cpu", "auto" as torchrun means them; None: one for each GPU, 1 without GPUs, or the
    slots that a hostfile or Slurm gives.
    hosts, hostfile: hosts to use over SSH, lines such as "node-a" or "node-a slots=8" or a file of them. Without either
    the nodes of the Slurm allocation that this process is in, else this machine.
    include, exclude: choose hosts and slots, as `launch --include` does.
    env: variables for every rank.
    max_restarts: start again after a failure, so often.
    log_dir: parent of the run folder with all output; default $LAUNCH_LOG_DIR, else `runs`.
    timeout_s: end the job when it takes longer, its start included.
    output: "console" shows lines of ranks, prefixed with `[rank]`, on sys.stdout and sys.stderr; "files" shows nothing;
    a function gets rank, stream and line of each.
    options: what is seldom needed.

    Raises: RankFailed for the first rank that failed, its own exception as the cause; JobTimeout; UsageError when the
    call is wrong or cannot be sent; TransportError when a host cannot be reached; KeyboardInterrupt after an interrupt,
    when all ranks have ended.
    """
    with in_python_words():
        parameters = Parameters(
            command=command_for(target, args),
            num_gpus=ranks,
            hosts=hosts,
            hostfile=hostfile,
            include=include,
            exclude=exclude,
            env=env or {},
            max_restarts=max_restarts,
            log_dir=log_dir,
            timeout_s=timeout_s,
            options=options,
        )
        ended = execute(parameters, output_for(output))
    return ended.results() if parameters.is_call else ended.outcome()


def execute(parameters: Parameters, output: Output, job_id: str | None = None, run_folder: Path | None = None) -> Ended:
    """Run a job to its end, also when ranks fail. On the main thread signals shut the job down gracefully.

    job_id, run_folder: given where they are known before the job. Raises: LauncherError when nothing could be started;
    JobTimeout; KeyboardInterrupt after an interrupt, when all ranks have ended.
    """
    here = Here.now()
    hosts, ssh = parameters.given_hosts(here), parameters.ssh_options
    job = Job(parameters.request(here), here, ssh, hosts=hosts, job_id=job_id, run_folder=run_folder)
    try:
        plan = job.plan()
        for note in (*job.selection.notes, *plan.notes):
            output.say(note)
        return _run(job, plan, output, parameters.timeout_s)
    finally:
        job.close()


def _run(job: Job, first: JobPlan, output: Output, timeout_s: float | None) -> Ended:
    """Run a job to its end. Raises: as `execute`."""
    exports = Exports(first)
    for note in exports.notes:
        output.say(note)
    signals = SignalQueue(first.stop_signals)
    display = Display(exports.beside(output), signals)
    exports.begin(display.warning)
    is_main = threading.current_thread() is threading.main_thread()
    report: RunReport | None = None
    with signals.listening() if is_main else contextlib.nullcontext(), _ending_after(timeout_s, signals) as is_over:
        try:
            report = run_job(job, first, display, signals)
            display.put(exports.close, report)
            for text in report.warnings():
                display.warning(text)
        except LauncherError:
            if signals.first_stop is None:
                raise  # else the job was ended before any rank was started
        finally:
            display.put(exports.close)
            display.put(output.finish)
            display.close()
    display.check()
    plan = output.plan or first
    _raise_if_stopped(plan, report, signals.first_stop, timeout_s if is_over.is_set() else None)
    if report is None:
        raise RuntimeError("a run without a report was stopped")
    return Ended(report, plan.run_folder, {rank: bytes(data) for rank, data in output.answers.items()})


def _raise_if_stopped(plan: JobPlan, report: RunReport | None, number: int | None, time_s: float | None) -> None:
    """Raise what a signal means to the caller. report: None when no rank was started. time_s: all of it has passed."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if report is not None and (report.interrupted_by is None or report.failure is not None):
        return
    if time_s is not None:
        raise JobTimeout(
            f"the job had not ended after {format_duration(time_s)}, and its ranks were ended",
            where=f"job {plan.job_id}",
            hint=f"output of the ranks: {plan.run_folder}; timeout_s is what the whole job may take",
        )
    if number is not None:
        # All ranks have ended. What the signal means to this process is decided by its own handler.
        signal.raise_signal(number)
        raise JobError(f"{signal.Signals(number).name} ended the ranks", exit_code=128 + number)


@contextlib.contextmanager
def _ending_after(timeout_s: float | None, signals: SignalQueue) -> Iterator[threading.Event]:
    """Ask for the end of the job, through `signals`, once the time is over; the event says whether it is."""
    is_over = threading.Event()

    def end() -> None:
        is_over.set()
        signals.ask(signal.SIGTERM)

    timer = threading.Timer(min(timeout_s or 0.0, threading.TIMEOUT_MAX), end)  # more, as `inf` is, no lock can wait
    timer.daemon = True
    if timeout_s is not None:
        timer.start()
    try:
        yield is_over
    finally:
        timer.cancel()
