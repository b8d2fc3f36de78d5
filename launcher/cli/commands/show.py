"""`launch show`: what a run did, in figures, of a job that has ended or that still runs."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click

from launcher.base.units import format_duration, printable
from launcher.cli.commands.jobs import job_argument
from launcher.cli.console.streams import echo_rows, echo_table
from launcher.cli.views.facts import (
    OUTSIDE,
    facts_of,
    findings_of,
    load_run,
    notes_of,
    safe,
    state_of,
    step_time,
)
from launcher.journal.summary import Summary

# What is read of the ranks' files at most: in half a second, start of the command included.
_MAX_BYTES = 3 << 20
_COLUMNS = 80

_EPILOG = """\b
examples:
  launch show calm-otter-4f2a
  launch show runs/calm-otter-4f2a --json
"""


@click.command("show", epilog=_EPILOG)
@job_argument
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def show(job: str, as_json: bool) -> None:
    """Show what JOB did: verdicts, speed, loss, where the time went, memory, restarts.

    JOB is an id of `launch ps`, or the beginning of one, or the path of a run folder. It may still run.
    """
    run = load_run(job, _MAX_BYTES)
    if as_json:
        click.echo(
            json.dumps(run.summary.as_dict() | {"state": state_of(run), "run_folder": str(run.folder)}, indent=2)
        )
        return
    for line in _finding_lines(run.summary):
        click.echo(line)
    _echo_facts(facts_of(run))
    if run.summary.phases_s:
        click.echo()
        _echo_phases(run.summary)
    for note in notes_of(run.summary):
        click.echo(f"\n{note}")


def _finding_lines(summary: Summary) -> Iterator[str]:
    for finding in findings_of(summary):
        sign, color = ("✗", "red") if finding.is_critical else ("!", "yellow")
        yield click.style(f"{sign} ", fg=color) + click.style(safe(finding.text), bold=finding.is_critical)
        for name, text in (("log", finding.log), ("next", finding.next)):
            if text:
                yield f"  {name:<5} {safe(text)}"


def _echo_facts(rows: list[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(Text(name), Text(printable(text)))
    echo_table(table, Console(width=_COLUMNS))


def _echo_phases(summary: Summary) -> None:
    whole_s = summary.duration_s or sum(summary.phases_s.values())
    rows = [
        (
            name,
            format_duration(time_s),
            f"{time_s / whole_s:.1%}",
            step_time(summary.phases_of_step_s.get(name, 0.0)),
        )
        for name, time_s in sorted(summary.phases_s.items(), key=lambda each: -each[1])
    ]
    if summary.outside_s:
        share = f"{summary.outside_s / whole_s:.1%}"
        rows.append((OUTSIDE, format_duration(summary.outside_s), share, ""))
    echo_rows(("PHASE", "TIME", "SHARE", "A STEP"), rows, num_texts=1)
