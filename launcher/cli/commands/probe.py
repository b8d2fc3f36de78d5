"""`launch probe`: how quick are these hosts, their devices and the links between them?"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from launcher.base.errors import LauncherError, UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.fields import Seconds, Whole
from launcher.base.processes import die_with_parent
from launcher.base.units import counted, format_bytes
from launcher.cli.console import streams
from launcher.cli.options.command import Command, Number, declared, given_words, under
from launcher.cli.options.hosts import HOST_CHOICE, REACHING
from launcher.planner.speed import Fit, Speed, fits_of, kept_file, slow
from launcher.transport.command import last_json, own_argv

_MODULE = "launcher.probes.speed"
_EPILOG = """\b
examples:
  launch probe
  launch probe --hostfile hosts --disk /local_nvme
  launch probe --hostfile hosts --json > speed.json
"""
_ranks = under("Ranks")
_OWN: tuple[Callable[[Any], Any], ...] = (
    _ranks("--num-gpus", type=Number(Whole(1, 1024)), help="Ranks on each node. Default: one for each GPU."),
    click.option(
        "--seconds", type=Number(Seconds(1.0)), default=15.0, help="How long it measures, about. Default: 15."
    ),
    click.option("--disk", metavar="DIR", help="Measure the disk of DIR on every host, too."),
    click.option("--plot", metavar="FILE", help="Draw the collectives by size into FILE: .png, .svg or .pdf."),
    click.option("--json", "as_json", is_flag=True, help="Print what was measured as JSON."),
)


@click.command("probe", cls=Command, details=("SSH",), epilog=_EPILOG)
@declared((*_OWN[:1], *HOST_CHOICE, *REACHING, *_OWN[1:]))
@click.pass_context
def probe(ctx: click.Context, /, seconds: float, disk: str | None, plot: str | None, as_json: bool, **_: Any) -> None:
    """Measure matrix products, memory, every collective by size, links between hosts and disks, on all ranks at once.

    What is measured is kept with its date in ~/.cache/launch/speed, for the planner. A rank, disk or link that is much
    slower than the others is named; exit code 1 then.
    """
    draw = None if plot is None else _drawing()
    found = _measure(given_words(ctx), [str(seconds), *([os.path.abspath(disk)] if disk else [])])
    kept = _keep(found)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    else:
        _show(found)
        click.echo("not kept" if kept is None else f"kept in {kept}")
    if plot is not None and draw is not None:
        draw(found, plot)
    if slow(found):
        sys.exit(ExitCode.FAILURE)


def _measure(options: Sequence[str], arguments: Sequence[str]) -> Speed:
    """Run the ranks as a job of their own. Raises: LauncherError where it fails."""
    with tempfile.TemporaryDirectory(prefix="launch-probe-") as logs:
        run = ["run", "--quiet", "--plain", "--log-dir", logs, *options, "--module", _MODULE, *arguments]
        ended = subprocess.run(
            [*own_argv("launcher.cli.main"), *run],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
            check=False,
        )
    plain = "".join(re.sub(r"^\[[^]]*\] ", "", line) for line in ended.stdout.splitlines(keepends=True))
    found = last_json(plain)
    if ended.returncode or found is None or "ranks" not in found:
        raise LauncherError(
            f"the ranks of the probe have ended with {ended.returncode}",
            hint="see what they said above, or `launch check`",
        )
    return Speed.from_json(json.dumps(found))


def _keep(found: Speed) -> Path | None:
    """Write what was measured to the user's cache; return the file, None where it cannot be written."""
    path = kept_file(found.key)
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found.as_json()))
    except OSError as error:
        streams.say(f"! {path}: {error.strerror}")
        return None
    return path


# ---- how it looks ----


def _show(found: Speed) -> None:
    nodes = len({each.node for each in found.ranks})
    click.echo(
        f"{counted(nodes, 'node')} · {counted(len(found.ranks), 'rank')} · {found.backend} · {found.measured} UTC"
    )
    kinds = list(found.ranks[0].matmul_flops)
    header = [
        "rank",
        "host",
        "device",
        *(f"{kind} TFLOP/s" for kind in kinds),
        "memory GB/s",
        "operation",
        "to device",
        "disk r/w",
    ]
    rows = [
        [
            str(each.rank), each.host, each.device,
            *(f"{each.matmul_flops.get(kind, 0.0) / 1e12:.3g}" for kind in kinds),
            _gigabytes(each.memory_bytes_per_s), f"{1e6 * each.kernel_s:.1f} µs" if each.kernel_s else "",
            _gigabytes(each.to_device_bytes_per_s),
            "" if each.disk_read_bytes_per_s is None
            else f"{_gigabytes(each.disk_read_bytes_per_s)} / {_gigabytes(each.disk_write_bytes_per_s)}",
        ]
        for each in found.ranks
    ]  # fmt: skip
    streams.echo_rows(header, rows, num_texts=3)
    if found.collectives:
        click.echo("GB/s of a link, by the bytes of the whole buffer:")
        streams.echo_rows(*_table_of_collectives(found), num_texts=2)
    if found.links:
        links = ", ".join(f"{' – '.join(link.hosts)} {_gigabytes(link.bytes_per_s)}" for link in found.links)
        click.echo(f"GB/s between two hosts, in each direction: {links}")
    for sentence in slow(found):
        click.echo(f"✗ {sentence}")


def _gigabytes(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e9:.3g}"


def _table_of_collectives(found: Speed) -> tuple[list[str], list[list[str]]]:
    sizes = sorted({each.num_bytes for each in found.collectives if each.group == "all ranks"})
    fits = fits_of(found.collectives)
    rates: dict[tuple[str, str], list[str]] = {}
    for each in found.collectives:
        rates.setdefault((each.kind, each.group), []).append(_gigabytes(each.bus_bytes_per_s))
    header = ["collective", "of", *map(format_bytes, sizes), "latency", "bandwidth"]
    rows = []
    for key, values in rates.items():
        fit = fits.get(key, Fit(0.0, 0.0))
        rows.append([*key, *values, f"{1e6 * fit.latency_s:.0f} µs", _gigabytes(fit.bytes_per_s)])
    return header, rows


def _drawing() -> Callable[[Speed, str], None]:
    """Return what draws a plot. Raises: UsageError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib, which is not installed", hint="pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    def draw(found: Speed, path: str) -> None:
        groups = list(dict.fromkeys(each.group for each in found.collectives)) or ["no collectives of one rank"]
        figure, axes = pyplot.subplots(1, len(groups), figsize=(5 * len(groups), 4), squeeze=False, sharey=True)
        for axis, group in zip(axes[0], groups, strict=True):
            for kind in dict.fromkeys(each.kind for each in found.collectives):
                points = [each for each in found.collectives if (each.kind, each.group) == (kind, group)]
                axis.plot([p.num_bytes for p in points], [p.bus_bytes_per_s / 1e9 for p in points], "o-", label=kind)
            axis.set(xscale="log", yscale="log", xlabel="bytes of the whole buffer", title=group)
            axis.grid(visible=True, alpha=0.3)
        axes[0][0].set_ylabel("GB/s of a link")
        if found.collectives:
            axes[0][0].legend()
        figure.suptitle(f"{counted(len(found.ranks), 'rank')}, {found.backend}, {found.measured} UTC")
        figure.tight_layout()
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise LauncherError(f"the plot cannot be written: {error}", where=path) from None

    return draw
