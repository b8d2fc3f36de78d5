"""`launch report`: what is installed here, to read or to put into a bug report."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import click

from launcher.base.units import format_bytes
from launcher.hosts.inventory import gather


@click.command("report")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def report(as_json: bool) -> None:
    """Show versions, devices, compilers and the kernels in use on this machine. No environment values."""
    found = gather()
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for name, text in rows(found):
        click.echo(f"{name:<10} {text}")


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
