"""`launch report`: what jobs did, as a page; without a job what is installed here, to put into a bug report."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from launcher.base.errors import UsageError
from launcher.base.secrets import MASK, mask_text
from launcher.base.units import counted, format_bytes, printable
from launcher.cli.commands.jobs import complete_job
from launcher.cluster.nodeset import fold
from launcher.hosts.inventory import gather
from launcher.plan.engine_config import config_argument
from launcher.registry.registry import JobEntry, find_job

_EPILOG = """\b
examples:
  launch report calm-otter-4f2a -o run.html
  launch report calm-otter-4f2a bold-lynx-77c1
  launch report
  launch report --job calm-otter --config ds_config.json > report.txt
"""


@click.command("report", epilog=_EPILOG)
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=complete_job)
@click.option("-o", "--output", metavar="FILE", help="Where to write the page of the jobs. Default: JOB.html.")
@click.option("--job", metavar="JOB", help="Add what a job ran and how it ended, and the config that it was given.")
@click.option("--config", metavar="FILE", help="Add a config file.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def report(jobs: tuple[str, ...], output: str | None, job: str | None, config: str | None, as_json: bool) -> None:
    """Write one page of HTML on what each JOB did and, of several, what differs between them.

    Without a JOB: show versions, devices, compilers and the kernels in use on this machine. No environment values, and
    no secrets. A JOB is an id of `launch ps`, or the beginning of one, or the path of a run folder.
    """
    if jobs:
        _write_page(jobs, output, {"--job": job, "--config": config, "--json": as_json})
        return
    if output is not None:
        raise UsageError("no JOB is named", where="--output", hint="launch ps shows the jobs there are")
    entry = None if job is None else find_job(job)
    if config is None and entry is not None:
        path = os.path.join(entry.cwd, config_argument(entry.command) or "")
        config = path if os.path.isfile(path) else None
    text = None if config is None else _text_of(config)
    found = gather()
    if entry is not None:
        found["job"] = {**dataclasses.asdict(entry), "state": entry.state, "report": _report_of(entry)}
    if config is not None:
        found["config"] = {"path": config, "text": text}
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for name, line in rows(found):
        click.echo(f"{name:<10} {line}")
    for title, body in (("nvidia-smi topo -m", found.get("topology")), (config, text)):
        if body:
            click.echo(f"\n{title}:\n{printable(body)}")


def _write_page(jobs: Sequence[str], output: str | None, others: dict[str, object]) -> None:
    from launcher.cli.views.facts import load_run
    from launcher.cli.views.page import write_page

    mixed = [name for name, value in others.items() if value]
    if mixed:
        raise UsageError("it says what is installed here, without a page of jobs", where=mixed[0], hint="leave one out")
    runs = [load_run(job) for job in dict.fromkeys(jobs)]
    path = Path(output or f"{runs[0].name}.html")
    write_page(runs, path)
    click.echo(path)


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return mask_text(file.read().rstrip())
    except OSError as error:
        raise UsageError(f"the config cannot be read: {error.strerror}", where=path) from None


def _report_of(entry: JobEntry) -> dict[str, Any] | None:
    """Return the report that the job's launcher has left, None before its end."""
    try:
        with open(os.path.join(entry.run_folder, "report.json"), encoding="utf-8") as file:
            left = json.load(file)
    except (OSError, ValueError):
        return None
    return _masked(left) if isinstance(left, dict) else None


def _masked(value: Any) -> Any:
    """Return plain data with secrets hidden in its texts: a traceback, the last lines of a rank."""
    if isinstance(value, dict):
        return {key: _masked(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_masked(inner) for inner in value]
    return mask_text(value) if isinstance(value, str) else value


def _job_text(job: dict[str, Any]) -> str:
    left = job["report"] or {}
    reason = (left.get("failure") or {}).get("reason")
    parts = [
        job["job_id"],
        job["state"] if job["exit_code"] is None else f"exit code {job['exit_code']}",
        f"{counted(job['num_ranks'], 'rank')} on {fold(job['hosts'])}",
        *([printable(reason)] if reason else []),
        printable(shlex.join(job["command"]).replace(shlex.quote(MASK), MASK)),
        printable(f"in {job['cwd']}"),
    ]
    return " · ".join(parts)


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the text form: a name and what there is to say."""
    machine, torch = found["machine"], found["torch"]
    memory = f"{format_bytes(machine['memory_available'] or 0)} of {format_bytes(machine['memory_total'] or 0)} free"
    disk = format_bytes(machine["disk_free"] or 0)
    packages = [f"{name} {version}" for name, version in machine["packages"].items() if version is not None]
    rows = [
        ("launch", f"{machine['launch']}  {machine['package']}"),
        ("python", f"{machine['python']}  {machine['python_path']}"),
        ("packages", " · ".join(packages)),
        ("machine", f"{machine['host']} · {machine['system']} · {machine['cpu']} · {machine['cores']} cores"),
        ("memory", f"{memory} · disk {disk} free here"),
        ("torch", f"cannot be used: {torch['error']}" if "error" in torch else _torch_text(torch)),
        ("devices", _devices_text(machine, torch)),
    ]
    if "error" not in torch:
        optimizers = [f"{kind}: {by_kernel(names.values())}" for kind, names in torch["optimizers"].items()]
        rows.append(("optimizer", " · ".join(optimizers)))
        rows.append(("kernels", " · ".join(f"{kind}: {kernel}" for kind, kernel in torch["kernels"].items())))
    if "job" in found:
        rows.append(("job", _job_text(found["job"])))
    return [*rows, *[(section, _programs_text(found[section])) for section in ("compilers", "programs")]]


def by_kernel(labels: Iterable[str]) -> str:
    """Return labels such as `SGD[torch]` with each kernel named once, behind its optimizers."""
    names: dict[str, list[str]] = {}
    for label in dict.fromkeys(labels):
        name, _, kernel = label.partition("[")
        names.setdefault(f" [{kernel}" if kernel else "", []).append(name)
    return ", ".join(", ".join(group) + kernel for kernel, group in names.items())


def _torch_text(torch: dict[str, Any]) -> str:
    parts = [
        str(torch["version"]),
        f"CUDA {torch['cuda']}" if torch["cuda"] else "no CUDA",
        f"NCCL {torch['nccl']}" if torch["nccl"] else "no NCCL",
        "gloo" if torch["gloo"] else "no gloo",
        f"CPU capability {torch['cpu_capability']}",
    ]
    return " · ".join(parts)


def _devices_text(machine: dict[str, Any], torch: dict[str, Any]) -> str:
    devices = torch.get("devices", [])
    kinds = [f"{d['name']}, {format_bytes(d['memory_bytes'])}, capability {d['capability']}" for d in devices]
    texts = [f"{kinds.count(kind)} × {kind}" for kind in dict.fromkeys(kinds)]
    count = int(machine["devices"])
    if count != len(devices) and (count or devices):
        texts.append(f"{count} device files, but torch can use {len(devices)}")
    return " · ".join(texts) or "no GPU"


def _programs_text(programs: dict[str, Any]) -> str:
    return " · ".join(
        f"no {name}" if facts is None else f"{name} {facts['version'] or facts['path']}"
        for name, facts in programs.items()
    )
