"""`launch rehearse`: run a script as ranks of a world that is not there, and see what each would need and do."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from launcher.base import env
from launcher.base.errors import LauncherError, UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.fields import Whole
from launcher.base.units import counted, format_bytes, format_duration
from launcher.cli.console import streams
from launcher.cli.options.command import Command, Number, declared, files, memory_size, option
from launcher.planner.rehearsal import (
    KINDS,
    RankRehearsal,
    first_differences,
    ranks_of_earlier_stages,
    roles,
    sizes_of,
)
from launcher.transport.command import own_argv

AT_ONCE = 2  # rehearsals beside each other: each takes one core
_MAX_OUTPUT_BYTES = 8000  # of a script that failed
_EPILOG = """\b
examples:
  launch rehearse --ranks 64 train.py --deepspeed ds_config.json
  launch rehearse --ranks 1024 --rank 5 --gpu-memory 80GB train.py --model 7b
  launch rehearse --ranks 16 --all-roles --json rehearsal.json -m package.train
"""


@dataclass(frozen=True)
class RehearseOptions:
    """The options of one `launch rehearse`, by name."""

    ranks: int
    rank: int | None
    all_roles: bool
    gpus_per_node: int
    backend: str
    gpu_memory: int | None
    ladder: bool
    steps: int
    json_path: str | None
    module: bool
    verbose: bool
    script: str
    script_args: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank >= self.ranks:
            hint = f"use 0 to {self.ranks - 1}"
            raise UsageError(f"--rank {self.rank} is not one of {counted(self.ranks, 'rank')}", hint=hint)
        if self.rank is not None and self.all_roles:
            raise UsageError("--rank and --all-roles exclude each other", hint="leave one of them out")
        if self.ladder and self.gpu_memory is None:
            raise UsageError("--ladder needs --gpu-memory", hint="say how much a GPU has: --gpu-memory 80GB")
        if not self.module and not Path(self.script).exists():
            raise UsageError("no such script", where=self.script, hint="give a path, or -m and the name of a module")

    @property
    def command(self) -> list[str]:
        """What the rank runs: its kind, target and arguments."""
        return ["module" if self.module else "script", self.script, *self.script_args]

    def wanted(self, rank: int, announced: dict[str, str]) -> dict[str, Any]:
        """Return what `launcher.rehearse.main` gets."""
        return {
            "rank": rank, "world_size": self.ranks, "gpus_per_node": self.gpus_per_node, "num_steps": self.steps,
            "backend": self.backend, "announced": announced,
        }  # fmt: skip


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    option("--ranks", type=Number(Whole(1, 10**5)), required=True, help="Ranks of the world."),
    option("--rank", type=Number(Whole(0, 10**5)), help="Rehearse this one alone. Default: one of each role."),
    option(
        "--all-roles", is_flag=True,
        help="One rank of each place in the mesh, tensor and sequence ranks too. Default: the first, the last, one of"
        " each pipeline stage and of each set of experts.",
    ),
    option("--gpus-per-node", type=Number(Whole(1, 1024)), default=8, help="Ranks on each node. Default: 8."),
    option(
        "--backend", type=click.Choice(["nccl", "gloo"]), default="nccl",
        help="Whose way of carrying out collectives: of GPUs or of CPUs. Default: nccl.",
    ),
    option(
        "--gpu-memory", callback=memory_size, metavar="SIZE",
        help="Memory of one GPU: exit code 1 if a rank needs more.",
    ),
    option(
        "--ladder", is_flag=True,
        help="Where --gpu-memory is too small, rehearse smaller micro-batches, recomputation, higher stages and offload"
        " until a rank fits.",
    ),
    option("--steps", type=Number(Whole(1, 1000)), default=2, help="Optimizer steps to take. Default: 2."),
    option("--json", "json_path", metavar="FILE", help="Write all that was found to FILE, too."),
    option("-m", "--module", is_flag=True, help="SCRIPT is a module: package.train."),
    option("--verbose", "-v", is_flag=True, help="Show what the script prints."),
)  # fmt: skip


@click.command(
    "rehearse",
    cls=Command,
    epilog=_EPILOG,
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@declared(_OPTIONS)
@click.argument("script", shell_complete=files)
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED)
def rehearse(**values: Any) -> None:
    """Run SCRIPT, as it is, as ranks of a world of any size on this machine, without a GPU and without its memory.

    The engine is the real one; tensors have shapes and no values, and the other ranks answer as if they held what this
    one holds. Shown are the memory of each phase, the collectives and bytes of a step, and whether ranks of different
    roles issue the same collectives in the same order. Nothing is saved. Exit code 1: the script fails, ranks would
    wait for each other, or --gpu-memory is too small.
    """
    options = RehearseOptions(**values)
    announced: dict[str, str] = {}  # what stages of a pipeline return, by those that were rehearsed

    def run(rank: int, patch: dict[str, Any] | None = None) -> RankRehearsal:
        def run_alone(one: int) -> RankRehearsal:
            found = run_rank(options.wanted(one, announced), options.command, patch or {}, verbose=options.verbose)
            announced.update(found.announced)
            return found

        found = run_alone(rank)
        if found.needs_earlier_stages:
            for one in ranks_of_earlier_stages(sizes_of(found), rank):
                run_alone(one)
            found = run_alone(rank)
        return found

    found = [run(options.rank or 0)]
    if options.rank is None and found[0].error is None:
        others = [rank for rank in roles(sizes_of(found[0]), all_of_them=options.all_roles) if rank != 0]
        if others:
            streams.say(f"rehearsing {'ranks' if len(others) > 1 else 'rank'} {', '.join(map(str, others))}, too")
        # A stage of a pipeline waits for what the one before it says of the tensors that it returns.
        with ThreadPoolExecutor(AT_ONCE if sizes_of(found[0]).pipeline == 1 else 1) as pool:
            found += pool.map(run, others)
    differences = first_differences(found)
    is_well = _show(found, options.gpu_memory)
    for difference in differences:
        click.echo(f"✗ ranks would wait for each other: {difference}")
    if len(found) > 1 and not differences and all(one.error is None for one in found):
        click.echo(f"the {len(found)} rehearsed ranks issue the same collectives in the same order")
    most = max(found, key=lambda one: one.peak_bytes)
    if options.ladder and options.gpu_memory is not None and most.peak_bytes > options.gpu_memory:
        _climb_down(most, options.gpu_memory, functools.partial(run, most.rank))
    if options.json_path is not None:  # last: a file that cannot be written loses nothing
        plain = {"ranks": [one.as_json() for one in found], "differences": list(map(str, differences))}
        Path(options.json_path).write_text(json.dumps(plain))
    if differences or not is_well:
        sys.exit(ExitCode.FAILURE)


def _climb_down(most: RankRehearsal, gpu_memory: int, run: Callable[[dict[str, Any]], RankRehearsal]) -> None:
    """Rehearse the rank that needs most with what needs less, until it fits; show each rung, and the config to take."""
    from launcher.planner.ladder import DEVICE, EXAMPLE_NVME_PATH, combined, rungs

    facts, patch = most.engine, dict[str, Any]()
    left = [] if facts is None else rungs(facts, DEVICE, EXAMPLE_NVME_PATH)
    while left:
        rung = left.pop(0)
        if rung.needs:
            click.echo(f"{rung.change}: left out, the script would have to {rung.needs}")
            continue
        one = run(combined(patch, rung.patch))
        if one.error is not None:
            click.echo(f"{rung.change}: {one.error.splitlines()[-1]}")
            continue
        patch = combined(patch, rung.patch)
        host = format_bytes(one.host_bytes * min(one.gpus_per_node, one.world_size))
        sent = format_bytes(sum(one.traffic().values()))
        needed = f"{format_bytes(one.peak_bytes)} on the GPU, {host} on each host, {sent} sent in a step"
        click.echo(f"{rung.change}: {needed}")
        if one.peak_bytes <= gpu_memory:
            click.echo(f"fits {format_bytes(gpu_memory)} with: {json.dumps(patch)}")
            return
        if one.engine is not None and one.engine != facts:
            facts = one.engine
            left = rungs(facts, DEVICE, EXAMPLE_NVME_PATH)
    click.echo("the ladder ends here: more ranks, or GPUs with more memory")


def run_rank(wanted: dict[str, Any], command: Sequence[str], patch: dict[str, Any], *, verbose: bool) -> RankRehearsal:
    """Rehearse one rank in a process of its own. Raises: LauncherError where it leaves no result.

    patch: changes the script's config.
    """
    with tempfile.TemporaryDirectory(prefix="launch-rehearsal-") as folder:
        path, output = Path(folder, "rank.json"), Path(folder, "output")
        path.write_text(json.dumps(wanted))
        # One thread: little is computed, and what runs beside it would wait for the others' to spin.
        variables = {**os.environ, env.REHEARSAL.name: str(path), env.OMP_NUM_THREADS.name: "1"}
        if patch:
            variables[env.CONFIG_PATCH.name] = json.dumps(patch)
        with output.open("wb") as file:
            ended = subprocess.run(
                [*own_argv("launcher.rehearse.main"), *command],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr if verbose else file,
                stderr=sys.stderr if verbose else file,
                check=False,
            )
        text = path.read_text()
        if ended.returncode not in (0, 1) or "format" not in json.loads(text):
            shown = output.read_bytes()[-_MAX_OUTPUT_BYTES:].decode(errors="replace").rstrip()
            raise LauncherError(
                f"the rehearsal of rank {wanted['rank']} has ended with {ended.returncode} and left no result\n{shown}",
                hint="see all that it prints with --verbose",
            )
    return RankRehearsal.from_json(text)


# ---- how it looks ----


def _show(found: Sequence[RankRehearsal], gpu_memory: int | None) -> bool:
    """Print what was found; return whether every rank has reached its last step, within the memory of a GPU.

    All that there is to see is shown of the rank that needs most, and of those that have failed.
    """
    most = max(found, key=lambda one: one.peak_bytes)
    for one in found:
        click.echo(_headline(one))
        if one.error is not None:
            click.echo(f"✗ {one.error}")
        if one is most or one.error is not None:
            if one.peaks:
                _show_memory(one)
            _show_traffic(one)
    is_well = all(one.error is None for one in found)
    if gpu_memory is not None and most.peak_bytes:
        is_well = is_well and most.peak_bytes <= gpu_memory
        verdict = "fits" if most.peak_bytes <= gpu_memory else "✗ does not fit"
        needed = f"{format_bytes(most.peak_bytes)} on rank {most.rank} without CUDA's own memory"
        click.echo(f"{verdict} {format_bytes(gpu_memory)}: {needed}")
    return is_well


def _headline(one: RankRehearsal) -> str:
    mesh = f" · {sizes_of(one).equation}" if one.sizes else ""
    needed = f" · at most {format_bytes(one.peak_bytes)}" if one.peak_bytes else ""
    return (
        f"rank {one.rank} of {one.world_size}{mesh}{needed} · {counted(one.num_steps, 'step')} rehearsed in"
        f" {format_duration(one.seconds)} and {format_bytes(one.resident_bytes)} of this machine"
    )


def _show_memory(one: RankRehearsal) -> None:
    from rich import box
    from rich.table import Table

    found = {kind for peak in one.peaks.values() for kind in peak}
    kinds = [kind for kind in KINDS if kind in found]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("at its peak", no_wrap=True)
    for name in (*kinds, "together"):
        table.add_column(name, justify="right", no_wrap=True)
    for phase, peak in one.peaks.items():
        values = [peak.get(kind, 0) for kind in kinds]
        table.add_row(phase, *(format_bytes(value) if value else "" for value in values), format_bytes(sum(values)))
    streams.echo_table(table)
    if one.host_bytes or one.disk_bytes:
        per_node = min(one.gpus_per_node, one.world_size)
        click.echo(
            f"each host: {format_bytes(one.host_bytes * per_node)} page-locked,"
            f" {format_bytes(one.disk_bytes * per_node)} on disk"
        )


def _show_traffic(one: RankRehearsal) -> None:
    counts: dict[tuple[str, str], list[int]] = {}
    for call in one.calls_of_last_step():
        counts.setdefault((call.kind, one.groups[call.group].purpose), []).append(call.num_bytes)
    for (kind, purpose), sizes in counts.items():
        click.echo(f"{kind:<16}{len(sizes):>5} × of {purpose}, {format_bytes(sum(sizes))}")
    links = ", ".join(f"{format_bytes(size)} {link}" for link, size in one.traffic().items())
    kernels = ", ".join(f"{work.num_kernels:,.0f} in {phase}" for phase, work in one.work.items())
    if links:
        click.echo(f"sent in a step: {links}")
    if kernels:
        click.echo(f"operations of a step: {kernels}")
    for place, number in sorted(one.reads.items(), key=lambda item: -item[1])[:3]:
        shown = os.path.relpath(place) if place.startswith(os.getcwd() + os.sep) else place
        click.echo(f"the host waits for the device {number} × a step at {shown}")
