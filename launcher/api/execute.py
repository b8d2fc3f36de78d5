"""Run what a request asks for to its end: on any thread, with the launcher's own agents and supervision."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from launcher.api.outcome import Ended, JobTimeout
from launcher.api.output import Output
from launcher.api.parameters import Parameters
from launcher.base.errors import JobError, LauncherError
from launcher.base.units import format_duration
from launcher.fleet.signals import SignalQueue
from launcher.job.display import Display
from launcher.job.events import RunReport
from launcher.job.restart import run_job
from launcher.plan.plan import JobPlan
from launcher.plan.planning import Here, Job


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


def execute(parameters: Parameters, output: Output, job_id: str | None = None, run_folder: Path | None = None) -> Ended:
    """Run a job to its end, also when ranks fail. On the main thread signals end the job in order.

    job_id, run_folder: given where they are known before the job. Raises: LauncherError when nothing could be started;
    JobTimeout; KeyboardInterrupt after an interrupt, when all ranks have ended.
    """
    here = Here.now()
    hosts, ssh = parameters.given_hosts(here), parameters.options.ssh_options
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
    signals = SignalQueue(first.stop_signals)
    display = Display(output, signals)
    is_main = threading.current_thread() is threading.main_thread()
    report: RunReport | None = None
    with signals.listening() if is_main else contextlib.nullcontext(), _ending_after(timeout_s, signals) as is_over:
        try:
            report = run_job(job, first, display, signals)
            for text in report.warnings():
                display.warning(text)
        except LauncherError:
            if signals.first_stop is None:
                raise  # else the job was ended before any rank was started
        finally:
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
