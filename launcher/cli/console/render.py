"""Everything `launch run` shows: start lines, rank output, the one failure, plans. The only printing place."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from typing import TYPE_CHECKING, BinaryIO

import click

from launcher import __version__
from launcher.base.errors import LauncherError, TransportError
from launcher.base.secrets import MASK, mask_arguments
from launcher.base.units import counted, format_bytes, format_duration, printable
from launcher.cli.console import streams
from launcher.cli.console.lines import MixedLines, ShownOutput
from launcher.cli.options.output import LOG_LEVELS, OutputOptions
from launcher.job.events import Watcher
from launcher.job.verdicts import worst
from launcher.plan.plan import LADDER

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.base.progress import RankProgress
    from launcher.cli.console.live import LiveView
    from launcher.job.events import Failure, RunReport
    from launcher.journal.verdicts import Verdict
    from launcher.plan.plan import JobPlan
    from launcher.planner.ladder import Advice

_MAX_STACK_LINES = 200
_MAX_COMMAND_CHARS = 80  # that --dry-run shows of what starts an agent
_OUT_OF_MEMORY = (  # what to do about it
    "next  fewer ranks on the host, a smaller micro-batch or a higher ZeRO stage need less; so do",
    '      offload_optimizer and offload_param with "device": "nvme" in place of "cpu"',
)
_STREAMS: dict[str, Callable[[], BinaryIO]] = {
    "stdout": lambda: sys.stdout.buffer,
    "stderr": lambda: sys.stderr.buffer,
}


def show_error(error: LauncherError) -> None:
    """Print what is wrong, where, and what to do; all findings of the error, those that hosts share once."""
    diagnostics = error.diagnostics
    if isinstance(error, TransportError) and len(diagnostics) > 1:
        from launcher.cluster.nodeset import fold_findings

        diagnostics = tuple(fold_findings(diagnostics))
    for diagnostic in diagnostics:
        where = f"{diagnostic.where}: " if diagnostic.where else ""
        streams.say(click.style("✗ ", fg="red") + printable(where + diagnostic.message))
        if diagnostic.hint:
            streams.say(f"  → {printable(diagnostic.hint)}")


def show_plan(plan: JobPlan, setup: str, *, as_json: bool, has_whole_commands: bool) -> None:
    """Print what would happen. setup: shell text that runs on each host first."""
    if as_json:
        click.echo(json.dumps(plan.describe(), indent=2))
        return
    click.echo(printable("\n".join(_plan_lines(plan, setup, None if has_whole_commands else _MAX_COMMAND_CHARS))))


def _plan_lines(plan: JobPlan, setup: str = "", max_command_chars: int | None = None) -> list[str]:
    lines = [_headline(plan)]
    port = plan.master_port if plan.master_port is not None else "a free port"
    lines.append(f"  rendezvous  {plan.master_addr}, {port}")
    lines.append(f"  in          {plan.cwd}")
    words = [plan.command.target, *mask_arguments(plan.command.arguments)]
    lines.append(f"  ranks run   {plan.command.kind} {shlex.join(words).replace(shlex.quote(MASK), MASK)}")
    lines += [f"  setup       {printable(setup)}"] if setup else []
    for node in plan.placement.nodes:
        ranks = f"{node.ranks.start}-{node.ranks.stop - 1}" if node.num_ranks > 1 else str(node.ranks.start)
        slots = ",".join(map(str, node.host.slots))
        transport = plan.transports[node.node_rank]
        lines.append(f"  node {node.node_rank}  {node.host.name}  ranks {ranks}  slots {slots}  by {transport}")
        command = printable(plan.agent_commands.get(node.node_rank, ""))
        if max_command_chars is not None and len(command) > max_command_chars:
            command = f"{command[:max_command_chars]}… (-v: all of it)"
        lines.append(f"          {command}")
    if plan.given_env:
        lines.append(f"  environment given (names): {', '.join(sorted(plan.given_env))}")
    lines += [f"  {note}" for note in plan.notes]
    if "ssh" in plan.transports.values():
        lines.append(f"  environment passed on (names): {', '.join(sorted(plan.forwarded_env)) or 'none'}")
    return lines


def _restart_text(plan: JobPlan, report: RunReport) -> str:
    """Return which restart `plan` is: only those after a failure are counted against `--max-restarts`."""
    if report.failure is None:
        return "the ranks have saved, and start again"
    rung = None if report.advice is None else report.advice.rung
    if rung is not None and plan.rungs and plan.rungs[-1] == rung.patch:
        return f"rung {len(plan.rungs)} of the ladder, {rung.change}"
    return f"restart {plan.num_failures} of {plan.max_restarts}"


def _advice_lines(advice: Advice, *, climbs_down: bool) -> list[str]:
    """Return what needs less memory: what it changes, frees and costs. climbs_down: `launch` does so by itself."""
    rung, lines = advice.rung, []
    if rung is None:
        lines.append(f"  next  {advice.end}")
    else:
        freed = f" (frees {format_bytes(advice.freed_bytes)} on each rank)" if advice.freed_bytes else ""
        lines.append(f"  next  {rung.change}{freed}; costs: {rung.cost}")
        lines.append(f"        {json.dumps(rung.patch)}")
        if not climbs_down:
            lines.append("        --on-oom ladder does that by itself, from the last checkpoint with the same batch")
    if advice.skipped is not None:
        lines.append(f"  or    {advice.skipped.change}, once the script does this: {advice.skipped.needs}")
    return lines


def _headline(plan: JobPlan) -> str:
    sizes = {node.num_ranks for node in plan.placement.nodes}
    hosts, world = counted(len(plan.placement.nodes), "host"), f"world {plan.placement.world_size}"
    size = f"{hosts} × {counted(sizes.pop(), 'rank')} = {world}" if len(sizes) == 1 else f"{hosts}, {world}"
    if plan.placement.elsewhere:
        size += f" (node {plan.placement.nodes[0].node_rank} of {plan.placement.num_nodes} here)"
    return f"launch {__version__} · job {plan.job_id} · {size}"


def _lines_of_streams(*, has_prompts: bool) -> dict[str, MixedLines]:
    """Return what puts the lines of all ranks together, by stream; the same for both where they are one terminal."""
    stdout, stderr = (MixedLines(streams.columns_of(number), has_prompts=has_prompts) for number in (1, 2))
    return {"stdout": stdout, "stderr": stdout if streams.is_same_terminal(1, 2) else stderr}


def _evidence(failure: Failure) -> list[str]:
    """Return the lines that show what happened: the traceback, or else what the rank wrote last."""
    return [printable(line) for line in failure.traceback.rstrip().splitlines() or failure.last_lines]


class Console(Watcher):
    """Shows a run on the terminal or as plain lines."""

    def __init__(self, plan: JobPlan, options: OutputOptions, *, live: LiveView | None = None) -> None:
        """options: what to show. live: the panel, on a terminal."""
        self._plan = plan
        self._options = options
        self._level = LOG_LEVELS.index(options.level)
        # The panel moves the cursor anyway: who debugs a rank turns it off with --plain.
        has_prompts = live is None and plan.placement.world_size == 1 and os.isatty(0)
        self._lines = _lines_of_streams(has_prompts=has_prompts)
        self._live = live
        self._facts: Watcher = live or Watcher()  # gets what plain lines do not show
        self._has_prefixes = not options.no_prefix
        self._shown = ShownOutput()
        self._shown_traceback = ""  # of a rank that had failed and did not end

    def planned(self, plan: JobPlan) -> None:
        self._plan = plan
        if self._level == LOG_LEVELS.index("debug"):
            self.note("\n".join(_plan_lines(plan)))
        self.note(f"{_headline(plan)} · {plan.master_addr}:{plan.master_port} · logs {plan.run_folder}/")
        self._facts.planned(plan)

    def waiting(self, what: str) -> None:
        self.note(f"waiting for {what}")

    def started(self, rank: int) -> None:
        self._facts.started(rank)

    def progress(self, rank: int, progress: RankProgress) -> None:
        self._facts.progress(rank, progress)

    def ended(self, rank: int, status: int) -> None:
        self._facts.ended(rank, status)

    def raised(self, failure: Failure) -> None:
        """Show what a rank has raised that has not exited: what it says must not wait for its end."""
        who = f"rank {failure.rank} ({failure.host}, pid {failure.pid})"
        what = printable(f"{who} has failed but has not exited: {failure.reason}")  # not yet ✗: it may still end well
        lines = [click.style("! ", fg="yellow") + what, "", *(f"  {line}" for line in _evidence(failure)), ""]
        grace = format_duration(self._plan.grace_s)
        lines.append(f"  Its exit handlers and threads have {grace} (--grace) before all ranks are stopped.")
        self._say("\n".join(lines))
        self._shown_traceback = failure.traceback
        self._facts.warning(what)

    def stopping(self, why: str) -> None:
        self._facts.stopping(why)
        self.note(why)

    def restarting(self, plan: JobPlan, report: RunReport) -> None:
        """Show what failed, and that the job starts again."""
        self._flush()
        if report.failure is not None:
            self._show_failure(report, report.failure)
        self.note(f"{_restart_text(plan, report)}: {_headline(plan)}")

    def stacks(self, text: str, path: str) -> None:
        """Show the stacks of all ranks; of many ranks only where they are."""
        lines = text.splitlines()
        self._write(sys.stderr.buffer, ("\n".join(lines[:_MAX_STACK_LINES]) + "\n").encode("utf-8", "replace"))
        self.warning(f"stacks of all ranks: {path}")

    def warning(self, text: str) -> None:
        if self._level <= LOG_LEVELS.index("warning"):
            self._say(click.style("! ", fg="yellow") + printable(text))
            self._facts.warning(text)

    def verdict(self, verdict: Verdict) -> None:
        """Show what is wrong with the training, and since when, in one line; or that it is so no more."""
        self._facts.verdict(verdict)
        if verdict.until_step is not None:
            self.note(f"no longer, since step {verdict.until_step}: {verdict.text}")
        elif self._level <= LOG_LEVELS.index("warning"):
            since = f" (since step {verdict.since_step})" if verdict.since_step else ""
            colour = "red" if verdict.severity == "critical" else "yellow"
            self._say(click.style("! ", fg=colour) + printable(verdict.text + since))

    def note(self, text: str) -> None:
        """Print a line of our own; stdout is the ranks'."""
        if self._level <= LOG_LEVELS.index("info"):
            self._say(printable(text))

    def output(self, rank: int, stream: str, data: bytes) -> None:
        if not self._options.shows_all and not self._options.shows(
            rank - self._plan.placement.node_of(rank).first_rank, stream
        ):
            return
        self._shown.add(rank, data)
        if not self._has_prefixes and self._plan.placement.world_size == 1:  # no other's lines to keep apart
            self._write(_STREAMS[stream](), data)
            return
        self._write(_STREAMS[stream](), self._lines[stream].feed((rank, stream), self._prefix(rank), data))

    def idle(self) -> None:
        """Show lines that have no end yet, such as progress bars, where nothing has followed for a moment."""
        now_s = time.monotonic()
        for stream, lines in self._lines.items():
            self._write(_STREAMS[stream](), lines.settle(now_s))

    def suspending(self) -> None:
        self.note("suspended: the ranks run on, their output waits; `fg` or `bg` continues")
        self._facts.suspending()

    def continuing(self, away_s: float) -> None:
        self._facts.continuing(away_s)
        self.note(f"continued after {format_duration(away_s)}")

    def _prefix(self, rank: int) -> bytes:
        """Return `[3] `, with the host where there are several: `[3 node-b] `; nothing for --no-prefix."""
        return f"[{self._plan.placement.label(rank)}] ".encode("utf-8", "replace") if self._has_prefixes else b""

    def finish(self, report: RunReport) -> None:
        """Print the rest of the output and how the run ended."""
        self._flush()
        self.close()
        if report.failure is not None:
            self._show_failure(report, report.failure)
        for text in report.warnings():
            self.warning(text)
        found = worst(report.verdicts)
        if found is not None and self._level <= LOG_LEVELS.index("warning"):
            more = f" (and {len(report.verdicts) - 1} more in report.json)" if len(report.verdicts) > 1 else ""
            what = f"{found.text}{more}; next: {found.next}"
            self._say(click.style("! ", fg="red" if found.severity == "critical" else "yellow") + printable(what))
        if report.training is not None:
            self.note(report.training.text())

    def close(self) -> None:
        """Take the panel away, also when the run has ended with an error. May be called twice."""
        if self._live is not None:
            self._live.close()

    def _flush(self) -> None:
        """Show the rest of each rank's output that had no line end."""
        for stream, lines in self._lines.items():
            self._write(_STREAMS[stream](), lines.flush())

    def _show_failure(self, report: RunReport, failure: Failure) -> None:
        host = failure.host
        if failure.away_s is not None:
            what = (
                f"launch was suspended for {format_duration(failure.away_s)}, longer than its lease"
                f" ({format_duration(self._plan.lease_s)}): {host} ended its ranks"
            )
        elif failure.is_start_failure:
            what = f"could not start ranks on {host}: {failure.reason}"
        elif failure.rank is None:
            what = f"{host} was lost {format_duration(failure.after_s)} after start: {failure.reason}"
        else:
            what = (
                f"rank {failure.rank} ({host}, pid {failure.pid}) failed"
                f" {format_duration(failure.after_s)} after start: {failure.reason}"
            )
        shown = _evidence(failure)
        is_known = bool(failure.traceback) and failure.traceback == self._shown_traceback
        what = printable(what) + (" (its traceback is above)" if is_known else "")
        lines = [click.style(f"✗ {what}", fg="red", bold=True)] + ([] if is_known else [""])
        if is_known:
            shown = []
        elif not failure.traceback and self._shown.has(failure.rank, "\n".join(failure.last_lines)):
            shown = ["(its last lines are above)"]
        lines += [f"  {line}" for line in shown]
        lines += [""] if shown else []
        if report.num_stopped:
            were = "was" if report.num_stopped == 1 else "were"
            others = counted(report.num_stopped, "other rank")
            lines.append(f"  {others} {were} stopped ({format_duration(report.stop_s)}).")
        if not (report.unconfirmed_hosts or report.left_pids):
            cleaned = f"No process with the job's id is left on {', '.join(report.cleaned_hosts)}."
            lines.append(f"  {cleaned if report.cleaned_hosts else 'Nothing is left running.'}")
        if failure.log:
            lines.append(f"  log   {failure.log}")
        if failure.oom and failure.max_rss_bytes:
            held = format_bytes(failure.max_rss_bytes)
            lines.append(f"  why   {failure.oom}; this rank held up to {held}")
        if report.advice is not None and report.advice.has_ladder:
            lines += _advice_lines(report.advice, climbs_down=self._plan.on_oom == LADDER)
        elif failure.oom and failure.max_rss_bytes:
            lines += [f"  {line}" for line in _OUT_OF_MEMORY]
        elif failure.hint:
            lines.append(f"  next  {failure.hint}")
        elif failure.signal_name == "SIGKILL":
            lines.append("  next  killed by another process: the kernel recorded no out-of-memory kill on that host")
        self._say("\n".join(lines))

    def _say(self, text: str) -> None:
        """Print a line of our own to stderr; its colours are for terminals."""
        shown = text if streams.shows_colors(sys.stderr) else click.unstyle(text)
        self._write(sys.stderr.buffer, f"{shown}\n".encode("utf-8", "backslashreplace"), is_ours=True)

    def _write(self, stream: BinaryIO, data: bytes, *, is_ours: bool = False) -> None:
        """Write bytes as they are, above the panel where there is one. is_ours: whole lines of the launcher."""
        if is_ours:
            name = "stdout" if stream is sys.stdout.buffer else "stderr"
            data = self._lines[name].interrupt() + data
        if data and (self._live is None or not self._live.write(stream, data, is_ours=is_ours)):
            streams.write(stream, data)
