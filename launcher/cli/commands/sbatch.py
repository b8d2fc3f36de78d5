"""`launch sbatch`: write a batch script, submit it, follow its log, or explain the mistakes of one."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import click

from launcher.base.errors import LauncherError, TransportError, UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.fields import Whole, filled
from launcher.base.folders import working_folder
from launcher.base.timeouts import timeouts
from launcher.cli.options.command import Number, declared
from launcher.slurm.lint import lint_script
from launcher.slurm.queue import JobState, JobWatch, poll_intervals, refresh, submit
from launcher.slurm.script import Sbatch, job_name_of, render_script

_READ_INTERVAL_S = 1.0  # of the log
_READ_BYTES = 1 << 16
_BATCH_OPTIONS = (
    click.option("-J", "--job-name", help="Default: the script's name."),
    click.option("-N", "--nodes", type=Number(Whole(1)), default=1, help="Default: 1."),
    click.option("--gpus-per-node", metavar="[TYPE:]N", help="GPUs of each node, one rank each."),
    click.option("--gres", metavar="LIST", help="Other resources of each node, such as nvme:1, or its GPUs: gpu:8."),
    click.option("-c", "--cpus-per-task", type=Number(Whole(1)), metavar="N", help="CPUs of each node."),
    click.option("-t", "--time", metavar="D-HH:MM:SS", help="Time limit."),
    click.option("-o", "--output", metavar="FILE", help="Log of the job. Default: %x-%j.out."),
    click.option("-e", "--error", metavar="FILE", help="Log of stderr. Default: in the same file as stdout."),
    click.option("-p", "--partition", help="Partition of the job."),
    click.option("-A", "--account", help="Account that is charged."),
    click.option("-q", "--qos", help="Quality of service."),
    click.option("-C", "--constraint", help="Features that the nodes must have."),
    click.option("-w", "--nodelist", metavar="NODES", help="Nodes that the job must get, such as node[1-4]."),
    click.option("-x", "--exclude", metavar="NODES", help="Nodes that the job must not get."),
    click.option("--reservation", metavar="NAME", help="Take the nodes from this reservation."),
    click.option("--mem", metavar="SIZE", help="Memory of each node; 0 is all of it."),
    click.option("--mem-per-cpu", metavar="SIZE", help="Memory for each CPU, in place of --mem."),
    click.option("--exclusive", is_flag=True, help="Do not share the nodes with other jobs."),
    click.option("--mail-user", metavar="ADDRESS", help="Who gets mail."),
    click.option("--mail-type", metavar="TYPES", help="Events that send mail, such as END,FAIL."),
    click.option("-d", "--dependency", metavar="TYPE:JOB", help="Start after other jobs, such as afterok:1234."),
    click.option(
        "--signal", metavar="B:SIG@SECONDS", help="Send `launch` the signal so many seconds before the time limit."
    ),
    click.option("-a", "--array", metavar="RANGE", help="Submit one job for each number, such as 0-7%2."),
    click.option("--container-image", metavar="IMAGE", help="Run the ranks in it: a .sif by apptainer, else by pyxis."),
    click.option("--requeue", is_flag=True, help="Warn the ranks before the time limit; start again when they ask."),
    click.option("--setup", multiple=True, metavar="COMMAND", help="Shell line before `launch`. Repeatable."),
)


@click.command(
    "sbatch",
    context_settings={"allow_interspersed_args": False},
)
@declared(_BATCH_OPTIONS)
@click.option("--launch-args", default="", metavar="TEXT", help='Options of `launch run`, such as "--grace 30".')
@click.option("--template", type=click.Path(path_type=Path), metavar="FILE", help="A Jinja2 template of your own.")
@click.option("--chain", type=Number(Whole(1)), default=1, metavar="N", help="Submit N jobs, one after the other.")
@click.option("--submit", "submits", is_flag=True, help="Submit the script and print the number of the job.")
@click.option("--follow", is_flag=True, help="Submit, then show the log until the job ends; its exit code is ours.")
@click.option("--lint", "lint_file", metavar="FILE", help="Explain the mistakes of a batch script and stop.")
@click.argument("script", required=False)
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]...")
@click.pass_context
def sbatch(ctx: click.Context, /, **values: Any) -> None:
    """Write the batch script that runs SCRIPT on nodes of a Slurm cluster to stdout, or submit it.

    Inside the job `launch` takes nodes and GPUs from Slurm. The number of tasks on each node is always 1.
    """
    if values["lint_file"] is not None:
        _lint(values["lint_file"])
        return
    if values["script"] is None:
        raise UsageError("SCRIPT is missing", hint="launch sbatch [OPTIONS] SCRIPT [ARGS]...")
    follow, chain = values["follow"], values["chain"]
    submits = values["submits"] or follow
    if follow and (chain > 1 or values["array"] is not None):
        raise UsageError("--follow shows one log, and this makes several jobs", hint="use --submit, then tail the logs")
    if chain > 1 and not submits:
        raise UsageError("--chain is about submitting", hint="add --submit")
    job_name = values["job_name"] or job_name_of(values["script"])
    options = filled(Sbatch, {**values, "job_name": job_name})
    try:
        launch_args = shlex.split(values["launch_args"])
    except ValueError as error:
        raise UsageError(f"{error}", where="--launch-args", hint="close the quote") from None
    words = ["run", *launch_args, values["script"], *values["script_args"]]
    run_values = _parsed_run(ctx, words[1:])
    text = render_script(options, words, values["template"])
    if not submits:
        click.echo(text, nl=False)
        return
    _refuse_missing(run_values)
    job_id = _submit_chain(text, chain, options)
    if follow:
        ctx.exit(_follow(job_id))


def _parsed_run(ctx: click.Context, words: list[str]) -> dict[str, Any]:
    """Return the values of the `launch run` line that the job will run. Raises: UsageError."""
    from launcher.cli.commands.run import run
    from launcher.cli.usage import as_usage_error

    try:
        return run.make_context("run", words, parent=ctx.parent).params
    except (click.ClickException, UsageError) as error:
        found = (error if isinstance(error, UsageError) else as_usage_error(error)).diagnostics[0]
        raise UsageError(
            found.message, where=f"--launch-args: {found.where or ''}".rstrip(": "), hint=found.hint
        ) from None


def _refuse_missing(run_values: dict[str, Any]) -> None:
    """Refuse to submit what would wait in the queue and then fail. Raises: UsageError."""
    script = run_values["script"]
    if not (run_values["module"] or run_values["no_python"]) and not Path(script).exists():
        raise UsageError(
            f"{script} does not exist here, and the job would look for it from this folder",
            where=working_folder(),
            hint="check the path; a script that only the nodes see: without --submit, then `sbatch FILE`",
        )


def _submit_chain(text: str, length: int, options: Sbatch) -> int:
    """Submit the script `length` times, each job after the end of the one before; returns the first number."""
    first = last = submit(text)
    click.echo(first)
    for _ in range(length - 1):
        # "any": a job that ran into its time limit has not failed, the next one resumes.
        last = submit(text, [f"--dependency=afterany:{last}"])
        click.echo(last)
    if options.time is None:
        click.echo("! no --time: the partition's default holds, which may be minutes", err=True)
    return first


def _lint(path: str) -> None:
    """Raises: UsageError with every mistake."""
    try:
        text = Path(path).read_bytes().decode("utf-8", "replace")  # line ends as they are
    except OSError as error:
        raise UsageError(f"the script cannot be read: {error.strerror}", where=path) from None
    findings = lint_script(text, path, Path(working_folder()))
    if findings:
        raise UsageError.from_diagnostics(findings)
    click.echo(f"{path}: ok")


def _follow(job_id: int) -> int:
    """Copy the job's log to stdout until the job is over; returns its exit code. Ctrl-C leaves the job running."""
    position, told = 0, "None"
    watch = JobWatch(job_id, lambda text: click.echo(click.style("! ", fg="yellow") + text, err=True))
    state, polls = _known(watch, job_id), poll_intervals()
    ask_at_s, give_up_at_s = time.monotonic() + next(polls), math.inf
    try:
        while True:
            if time.monotonic() >= ask_at_s and not state.is_over:
                before, state = state, _known(watch, job_id)
                polls = polls if state.state == before.state else poll_intervals()
                ask_at_s = time.monotonic() + next(polls)
            if state.state == "PENDING" and state.reason != told:
                told = state.reason
                click.echo(f"job {job_id} waits in the queue: {told}", err=True)
            log = state.log
            if log is not None and not log.exists() and state.state != "PENDING":
                refresh(log.parent)  # once it is there, opening it shows all that was written
            has_log = log is not None and log.exists()
            if log is not None and has_log:
                position = _copy_new(log, position)
            if state.is_over:
                if has_log or state.state not in ("COMPLETED", "FAILED") or time.monotonic() > give_up_at_s:
                    break
                if give_up_at_s == math.inf:
                    give_up_at_s = time.monotonic() + timeouts().shared_disk_s
                    click.echo(f"job {job_id} has ended; waiting for its log, {state.log}", err=True)
            time.sleep(_READ_INTERVAL_S)
    except KeyboardInterrupt:
        click.echo(f"\njob {job_id} continues: end it with `scancel {job_id}`", err=True)
        return int(ExitCode.INTERRUPTED)
    if state.state == "COMPLETED":
        return 0
    error = LauncherError(
        f"job {job_id} ended as {state.state} (exit code {state.exit_code})",
        where=str(state.log),
        hint=None if state.reason in ("", "None") else f"Slurm's reason: {state.reason}",
    )
    error.exit_code = state.exit_code or ExitCode.FAILURE
    raise error


def _known(watch: JobWatch, job_id: int) -> JobState:
    """Return the state of the job. Raises: TransportError, also when Slurm has forgotten it."""
    state = watch.state()
    if state is None:
        raise TransportError(
            f"Slurm has forgotten job {job_id}", hint=f"sacct -j {job_id} shows how it ended, where accounts are kept"
        )
    return state


def _copy_new(path: Path, position: int) -> int:
    """Write what the log has got since `position`; returns the new position."""
    with path.open("rb") as log:
        position = min(position, os.fstat(log.fileno()).st_size)  # a job that starts again truncates its log
        log.seek(position)
        while data := log.read(_READ_BYTES):
            sys.stdout.buffer.write(data)
            position += len(data)
    sys.stdout.buffer.flush()
    return position
