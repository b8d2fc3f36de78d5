"""`launch io`: what the disk of a folder gives, and the `aio` section that gets it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from launcher.base.fields import Seconds
from launcher.base.units import format_bytes, parse_bytes
from launcher.cli.options.command import Number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.storage.measure import Rates

_LEAST_BYTES = 64 << 20
_EPILOG = """\b
examples:
  launch io /local_nvme
  launch io /local_nvme --size 8GiB --seconds 60
  launch exec --hostfile hosts -- "$(command -v launch)" io /local_nvme
"""


def _size(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    """Read a size of a file: 1GiB, 500MB."""
    found = parse_bytes(value)
    if found is None or found < _LEAST_BYTES:
        raise click.BadParameter(
            f"{value!r} is not a size of at least {format_bytes(_LEAST_BYTES)}; write 1GiB or 500MB."
        )
    return found


@click.command("io", epilog=_EPILOG)
@click.argument("folder", metavar="DIR", type=click.Path(exists=True, file_okay=False))
@click.option(
    "--size", "size_bytes", metavar="SIZE", callback=_size, default="1GiB",
    help="Bytes on the disk, larger than its caches. Default: 1GiB.",
)  # fmt: skip
@click.option(
    "--seconds", type=Number(Seconds(1.0)), default=20.0, help="How long it may take, more on a slow disk. Default: 20."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as JSON.")
def io(folder: str, size_bytes: int, seconds: float, as_json: bool) -> None:
    """Read and write in DIR as the engine does under nvme offload, with block sizes and queue depths in turns.

    Nothing is left in DIR, whatever ends the command. The printed section goes into the config of a job that offloads
    to this disk.
    """
    from launcher.storage.measure import NUM_MEASUREMENTS, DiskMeter, best, survey

    meter = DiskMeter(folder, size_bytes)
    try:
        with click.progressbar(length=NUM_MEASUREMENTS, label=f"measuring {folder}", file=sys.stderr) as bar:
            found = survey(meter, seconds, bar.update)
        notice, size_bytes = meter.notice, meter.size_bytes
    finally:
        meter.close()
    if as_json:
        click.echo(json.dumps(_plain(folder, size_bytes, notice, found), indent=2))
        return
    _show(f"{folder} · {format_bytes(size_bytes)} read and written over and over", notice, found, best(found))


def _show(headline: str, notice: str | None, found: Sequence[Rates], chosen: Rates) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from launcher.storage.measure import as_config

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("block_size", "queue_depth", "read GB/s", "write GB/s", "in turns"):
        table.add_column(name, justify="right", no_wrap=True)
    for rates in found:
        speeds = (rates.read_bytes_per_s, rates.write_bytes_per_s, rates.both_bytes_per_s)
        cells = [f"{rates.settings.block_size_bytes:,}", f"{rates.settings.queue_depth}", *map(_gb, speeds)]
        table.add_row(*cells, style="bold green" if rates is chosen else None)
    click.echo(headline)
    if notice is not None:
        click.echo(f"note: {notice}")
    console = Console()
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        if line.strip():
            click.echo(line.rstrip())
    read, write = _gb(chosen.read_bytes_per_s), _gb(chosen.write_bytes_per_s)
    memory = format_bytes(chosen.in_flight_bytes)
    click.echo(f"best: read {read} GB/s, write {write} GB/s, {memory} in flight. For the config:")
    click.echo(f'  "aio": {json.dumps(as_config(chosen.settings))}')


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f}"


def _plain(folder: str, size_bytes: int, notice: str | None, found: Sequence[Rates]) -> dict[str, Any]:
    from launcher.storage.measure import as_config, best

    rows = [
        {
            **as_config(rates.settings),
            "read_bytes_per_s": round(rates.read_bytes_per_s),
            "write_bytes_per_s": round(rates.write_bytes_per_s),
        }
        for rates in found
    ]
    aio = as_config(best(found).settings)
    return {"folder": folder, "size_bytes": size_bytes, "notice": notice, "measured": rows, "aio": aio}
