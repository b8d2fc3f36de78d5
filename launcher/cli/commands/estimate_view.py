"""How an estimate looks. Imports rich, so it is imported only where a table is shown."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import click
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from launcher.base.errors import Diagnostic
from launcher.base.units import counted, format_bytes
from launcher.cli.console.streams import echo_table
from launcher.planner.estimate import Estimate, Row, advice, tightest
from launcher.planner.memory import (
    CUBLAS_BYTES,
    NCCL_ALONE_BYTES,
    NCCL_BYTES,
    RankMemory,
    Setting,
    communicators,
)
from launcher.planner.settings import as_config
from launcher.sharding.pipeline import PipelinePlan

_NO_LIMIT = 1000
_USUAL_GPUS_GB = (8, 16, 24, 40, 80)
_Parts = dict[str, Callable[[RankMemory], int]]
_ALL_PARTS: _Parts = {
    "parameters": lambda memory: memory.parameters,
    "gradients": lambda memory: memory.gradients,
    "optimizer": lambda memory: memory.optimizer,
    "in flight": lambda memory: memory.in_flight,
    "activations": lambda memory: memory.activations,
    "context": lambda memory: memory.context,
}
_FEW_PARTS: _Parts = {  # for a narrow terminal
    "states": lambda memory: memory.model_states,
    "activations": lambda memory: memory.activations,
    "other": lambda memory: memory.in_flight + memory.context,
}


def show(found: Estimate, notices: Sequence[Diagnostic]) -> None:
    """Print the model, the table, and the first setting that fits."""
    for line in _headline(found):
        click.echo(line)
    click.echo()
    console = Console()
    table = _table(found, _ALL_PARTS)
    if console.is_terminal and _width(console, table) > console.width:
        table = _table(found, _FEW_PARTS)
    console.width = max(console.width, _width(console, table))  # a terminal folds a line that is too long; none is cut
    echo_table(table, console)
    click.echo()
    for line in (*_recommendation(found), *_remarks(found), *map(str, notices)):
        click.echo(line)


def _width(console: Console, table: Table) -> int:
    return Measurement.get(console, console.options.update(max_width=_NO_LIMIT), table).maximum


def _headline(found: Estimate) -> list[str]:
    model, machines, work = found.model, found.machines, found.workload
    setting = found.rows[0].setting
    element, states = setting.element, setting.states
    beside = states.num_beside_matrices
    frozen = model.num_params - model.num_trainable
    size = f"{model.num_params:,} parameters" + (f", {frozen:,} of them frozen" if frozen else "")
    world = f"{counted(machines.num_nodes, 'node')} × {counted(machines.gpus_per_node, 'GPU')}"
    if not setting.sizes.is_data_alone:
        world += f" = {setting.sizes.equation.rpartition(' = ')[0]}"
    bytes_each = f"{setting.policy.precision.param.value}: {element.param} bytes a parameter"
    if setting.trains:
        bytes_each += (
            f", {element.master} master, {element.grad} gradient, {element.state * states.num_of_element} optimizer"
            " states" + (f", {element.state * beside} where it is not a hidden matrix" if beside is not None else "")
        )
    lines = [f"{model.name} · {size} · {model.source}", f"{world} = world {machines.world_size} · {bytes_each}"]
    if setting.pipeline.num_ranks > 1:
        lines.append(_pipeline_text(setting.pipeline))
    if work is None:
        lines.append("activations are not counted: the model's shape is not known; give --layers, --hidden and --heads")
    else:
        kept = "activations all kept"
        if work.is_checkpointed:
            kept = "activations recomputed in blocks"
        elif work.is_inference:
            kept = "inference: keys and values kept"
        lines.append(f"micro-batch {work.batch_size} × {work.length:,} tokens · {kept} · {model.shape}")
    return lines


def _pipeline_text(plan: PipelinePlan) -> str:
    virtual = f", {plan.num_virtual} on each rank" if plan.num_virtual > 1 else ""
    step = f"{plan.num_micro_batches} micro-batches a step · idle {plan.idle_fraction:.0%} of it, in theory"
    return f"pipeline of {plan.num_stages} stages{virtual} · {plan.schedule} · {step}"


def _table(found: Estimate, parts: _Parts) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("stage", no_wrap=True)
    table.add_column("offload", no_wrap=True)
    absent = {"activations"} if found.workload is None else set()
    absent |= set() if found.rows[0].setting.trains else {"gradients", "optimizer"}
    shown = {name: part for name, part in parts.items() if name not in absent}
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    has_disk = any(row.disk_per_node for row in found.rows)
    places = ("per GPU", "per host", "disk per host") if parts is _ALL_PARTS else ("GPU", "host", "disk")
    for name in places if has_disk else places[:2]:
        table.add_column(name, justify="right", style="bold", no_wrap=True)
    machines = found.machines
    if machines.are_bounded:
        table.add_column("fits")
    for row in found.rows:
        mark = "*" if row.refusals else ""
        cells = [f"{row.setting.stage}{mark}", row.setting.offload_label]
        cells += [_size(part(row.memory)) for part in shown.values()]
        cells += [_size(row.memory.device), _size(row.host_per_node)]
        cells += [_size(row.disk_per_node)] if has_disk else []
        fits = [Text("yes", "green") if row.fits(machines) else Text("no", "red")] if machines.are_bounded else []
        table.add_row(*cells, *fits)
    return table


def _recommendation(found: Estimate) -> list[str]:
    machines = found.machines
    if not machines.are_bounded:
        return ["first setting that fits a GPU of", *_usual_gpus(found)]
    first = found.first_fit()
    if first is not None:
        lines = _fitting("first setting that fits", first)
        runnable = found.first_fit(runs_here=True)
        if first.refusals and runnable is not None:
            lines += _fitting("first that this release runs", runnable)
        return lines + [f"* not in this release: {refusal}" for refusal in first.refusals[:1]]
    least = tightest(found.ladder)
    lines = [f"nothing fits: {_words(least.setting)} is the smallest and needs {_needs(least)}"]
    for item in advice(found):
        does = "fits" if item.fits else "is the smallest"
        mark = " *" if item.row.refusals else ""
        lines.append(f"  with {item.option}: {_words(item.row.setting)} {does} ({_needs(item.row)}){mark}")
    return lines


def _fitting(what: str, row: Row) -> list[str]:
    mark = " *" if row.refusals else ""
    return [f"{what}: {_words(row.setting)} ({_needs(row)}){mark}", f"  {json.dumps(as_config(row.setting))}"]


def _needs(row: Row) -> str:
    needs = f"{format_bytes(row.memory.device)} per GPU"
    return f"{needs}, {format_bytes(row.host_per_node)} per host" if row.host_per_node else needs


def _usual_gpus(found: Estimate) -> list[str]:
    lines = []
    for size in _USUAL_GPUS_GB:
        row = found.first_fit(size * 10**9)
        if row is None:
            lines.append(f"  {size:>2} GB  none")
            continue
        host = f", {format_bytes(row.host_per_node)} per host" if row.host_per_node else ""
        mark = " *" if row.refusals else ""
        lines.append(f"  {size:>2} GB  {_words(row.setting)}{host}{mark}")
    return lines


def _remarks(found: Estimate) -> list[str]:
    lines = [f"note: {note}" for note in found.model.notes]
    lines += _sources(found)
    build = format_bytes(found.build_bytes)
    when = "training" if found.rows[0].setting.trains else "inference"
    lines.append(f"before {when}: {build} of each host's memory, where every rank builds the whole model in fp32")
    if any(row.refusals for row in (*found.rows, *found.ladder)):
        lines.append("* the engine of this release does not do this yet: launch config check says what it does")
    return lines


def _sources(found: Estimate) -> list[str]:
    """Say which columns tests hold to the engine, and what the context is made of."""
    setting, context_bytes = found.rows[0].setting, found.machines.context_bytes
    kept = "parameters, gradients, optimizer" if setting.trains else "parameters"
    kept += ", activations of a GPT" if found.workload is not None else ""
    lines = [f"measured by tests on CPUs: {kept}; the rest is reckoned"]
    if not context_bytes:
        return lines
    num = communicators(setting, found.machines.world_size)
    nccl = f"{counted(num, 'NCCL communicator')} of {format_bytes(NCCL_BYTES)}"
    if not num:
        nccl = f"an NCCL communicator without peers of {format_bytes(NCCL_ALONE_BYTES)}"
    cublas = format_bytes(CUBLAS_BYTES * (2 if setting.trains else 1))
    tables = ", the tables of the optimizer's kernel" if setting.trains else ""
    return [
        *lines,
        f"context, by rules of thumb: {format_bytes(context_bytes)} of CUDA, {nccl}, {cublas} of cuBLAS{tables}",
    ]


def _words(setting: Setting) -> str:
    offload = setting.offload_label
    return f"stage {setting.stage}" + ("" if offload == "none" else f", offload {offload}")


def _size(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"
