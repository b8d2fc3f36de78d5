"""`launch check`: could a job run on these hosts? One line a host, and a remedy for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from launcher.base.exit_codes import ExitCode
from launcher.base.folders import working_folder
from launcher.base.units import counted, format_bytes, printable
from launcher.cli.console.streams import say_waiting
from launcher.cli.options.command import Command
from launcher.cli.options.selection import HostOptions, host_options
from launcher.cluster.nodeset import fold
from launcher.hosts.check import Checker, CheckReport, Finding, HostCheck

_EPILOG = """\b
examples:
  launch check --hostfile hosts
  launch check --hostfile hosts --include node[01-04] --json

\b
exit codes: 0 a job can run · 1 something is wrong on a host · 69 a host could not be reached
"""

_MAX_LINE_CHARS = 110  # a longer remedy stands on a line of its own


@click.command("check", cls=Command, epilog=_EPILOG)
@host_options
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
@click.pass_context
def check(ctx: click.Context, /, as_json: bool, **values: Any) -> None:
    """Check all hosts at once: SSH, versions, devices, memory, disk, clock, this folder, TCP between all pairs.

    ✗ marks what prevents a job from running there, ! a warning. Nothing changes on the hosts; the check creates a
    temporary file in this folder, to test whether all hosts share it.
    """
    options = HostOptions.of(values)
    cluster = options.cluster()
    transports = options.transports(cluster)
    try:
        report = Checker(cluster, transports, say_waiting).run(working_folder())
    finally:
        transports.close()
    if as_json:
        click.echo(json.dumps(_plain(report), indent=2))
    else:
        _show(report)
    ctx.exit(exit_code_of(report))


def exit_code_of(report: CheckReport) -> int:
    """Return 128 + signal, 69, 1 or 0: the first that holds."""
    if report.interrupted_by is not None:
        return 128 + report.interrupted_by
    if not all(check.is_reachable for check in report.hosts):
        return ExitCode.UNREACHABLE
    return ExitCode.OK if all(check.is_ok for check in report.hosts) else ExitCode.FAILURE


def _show(report: CheckReport) -> None:
    width = max(len(check.host.name) for check in report.hosts)
    shared = _shared_findings(report.hosts)
    for check in report.hosts:
        findings = [finding for finding in check.findings if finding.for_many not in shared]
        if check.facts is None and not findings:  # all there is to say is said below, for several hosts at once
            continue
        mark = click.style("ok", fg="green") if check.is_ok else click.style("✗ ", fg="red")
        first = _facts_text(check) if check.facts is not None else _finding_text(findings.pop(0))
        click.echo(f"{check.host.name:<{width}}  {mark}  {printable(first)}")
        for finding in findings:
            click.echo(f"{'':<{width}}  {_sign(finding)}   {_finding_text(finding)}")
    for finding, names in shared.values():
        click.echo(f"{fold(names):<{width}}  {_sign(finding)}   {_finding_text(finding)}")
    for note in report.notes:
        click.echo(click.style("! ", fg="yellow") + printable(note))
    click.echo(_summary(report))


def _shared_findings(checks: Sequence[HostCheck]) -> dict[tuple[str, str], tuple[Finding, list[str]]]:
    """Return what holds for several hosts, with their names, by message and remedy."""
    found: dict[tuple[str, str], tuple[Finding, list[str]]] = {}
    for check in checks:
        for finding in check.findings:
            common = Finding(*finding.for_many, finding.is_error)
            found.setdefault(finding.for_many, (common, []))[1].append(check.host.name)
    return {key: (finding, names) for key, (finding, names) in found.items() if len(names) > 1}


def _sign(finding: Finding) -> str:
    return click.style("✗", fg="red") if finding.is_error else click.style("!", fg="yellow")


def _finding_text(finding: Finding) -> str:
    message, remedy = printable(finding.message), printable(finding.remedy)
    text = f"{message}  → {remedy}"
    return text if len(text) <= _MAX_LINE_CHARS else f"{message}\n      → {remedy}"


def _facts_text(check: HostCheck) -> str:
    facts = check.facts or {}
    devices, slots = int(facts["devices"]), len(check.host.slots)
    parts = [
        "this machine" if check.transport == "local" else f"{check.transport} {1000 * (check.connect_s or 0.0):.0f} ms",
        f"python {facts['python']}",
        f"torch {facts['packages']['torch'] or 'none'}",
        f"{counted(devices, 'GPU') if devices else 'no GPU'}, {counted(slots, 'slot')}",
        f"memory {format_bytes(facts['memory_available'] or 0)} free",
        f"disk {format_bytes(facts['disk_free'])} free" if facts["disk_free"] is not None else "no disk",
        f"clock {round(1000 * (check.skew_s or 0.0)):+d} ms",
    ]
    return " · ".join(parts)


def _summary(report: CheckReport) -> str:
    num_ok = sum(check.is_ok for check in report.hosts)
    text = f"{counted(len(report.hosts), 'host')}: {num_ok} ok" + (
        f", {len(report.hosts) - num_ok} ✗" if num_ok < len(report.hosts) else ""
    )
    if report.num_pairs:
        text += f" · TCP: {report.num_connected} of {report.num_pairs} connections between hosts"
    return text


def _plain(report: CheckReport) -> dict[str, Any]:
    return {
        "exit_code": int(exit_code_of(report)),
        "connections": {"tried": report.num_pairs, "made": report.num_connected},
        "notes": report.notes,
        "hosts": [
            {
                "host": check.host.name,
                "slots": list(check.host.slots),
                "ok": check.is_ok,
                "reachable": check.is_reachable,
                "transport": check.transport,
                "connect_s": check.connect_s,
                "clock_skew_s": check.skew_s,
                "facts": None if check.facts is None else {k: v for k, v in check.facts.items() if k != "token"},
                "findings": [
                    {"message": finding.message, "remedy": finding.remedy, "is_error": finding.is_error}
                    for finding in check.findings
                ],
            }
            for check in report.hosts
        ],
    }
