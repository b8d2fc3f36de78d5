"""How a plan looks: the table of settings, what would be if, and the command to run. Imports rich."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich import box
from rich.table import Table

from launcher.base.units import counted, format_bytes, format_count
from launcher.cli.console.streams import echo_table
from launcher.plan.engine_config import config_argument
from launcher.planner.plan import Plan, Row, guide_says, save_of

_Others = Sequence[tuple[str, str, Plan]]


def show(found: Plan, num_rows: int, others: _Others, num_tokens: float | None) -> None:
    """Print the question, the table, what the guides would have said, and what would be if."""
    question = found.question
    machines, model = question.machines, question.model
    where = f"{counted(machines.num_nodes, 'node')} × {counted(machines.gpus_per_node, 'rank')}"
    click.echo(f"{model.name} · {format_count(model.num_params)} parameters · {where} · {question.hardware.name}")
    length = question.computes.samples.length
    batch = f"{question.global_batch:,} samples a step" + (f" of {length:,} tokens" if length > 1 else "")
    shape = question.computes.shape
    click.echo(f"{batch} · {question.base_precision}" + (f" · {shape}" if shape is not None else ""))
    rows = found.of_each_kind()
    if rows:
        _show_rows(found, rows[:num_rows])
        if any(row.is_rehearsed for row in rows):
            click.echo("* as rehearsed")
        if len(rows) > num_rows:
            click.echo(f"{len(rows) - num_rows} more fit: --rows {len(rows)}")
    else:
        smallest = found.rows[0]
        click.echo(f"✗ nothing fits: {label(smallest)} is the smallest and {smallest.misfit(machines)}")
    click.echo(f"the guides' decision tree says: {guide_says(question)}")
    _show_quicker_misfit(found)
    num_bytes, seconds = save_of(question)
    click.echo(
        f"a checkpoint: {format_bytes(num_bytes)} on each node, {_seconds(seconds)} of its disk (hidden by asynchronous"
        " saves)"
    )
    days = None if num_tokens is None else found.days(num_tokens)
    if days is not None:
        click.echo(f"{format_count(num_tokens or 0)} tokens: {days:,.1f} days here")
    for name, text, other in others:
        click.echo(f"if {name}={text}: {_difference(found, other)}")


def label(row: Row) -> str:
    """Name a setting: stage and offload, mesh, and what of stage 3 is not as usual."""
    setting = row.setting
    offload = setting.offload_label
    parts = [f"stage {setting.stage}" + ("" if offload == "none" else f", {offload}")]
    if not setting.sizes.is_data_alone:
        parts.append(setting.sizes.equation.rpartition(" = ")[0])
    if setting.sizes.pipeline > 1:
        parts.append(setting.pipeline.schedule)
    parts += [f"{key}={value}" for key, value in row.patch.items()]
    return " · ".join(parts)


def _show_rows(found: Plan, rows: Sequence[Row]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("", "setting", "micro-batch", "recomputed"):
        table.add_column(name, no_wrap=True)
    unit = "tokens/s" if found.question.computes.samples.length > 1 else "samples/s"
    for name in ("step", unit, "per rank", "per host"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("beside computing", no_wrap=True)
    for number, row in enumerate(rows, start=1):
        table.add_row(
            str(number),
            label(row),
            f"{row.micro_batch} × {row.num_micro_batches}",
            "yes" if row.is_checkpointed else "no",
            _seconds(row.seconds),
            format_count(found.question.tokens_per_step / row.seconds),
            format_bytes(row.memory.device) + (" *" if row.is_rehearsed else ""),
            format_bytes(row.host_per_node) if row.host_per_node else "-",
            row.reason,
        )
    echo_table(table)


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _show_quicker_misfit(found: Plan) -> None:
    """Say which limit stands before a quicker setting."""
    best, machines = found.best, found.question.machines
    if best is None:
        return
    quicker = [row for row in found.rows if row.seconds < 0.98 * best.seconds and row.misfit(machines) is not None]
    if quicker:
        row = min(quicker, key=lambda one: one.seconds)
        gain = 1 - row.seconds / best.seconds
        click.echo(f"{gain:.0%} quicker, but does not fit: {label(row)}, {row.micro_batch} × {row.num_micro_batches}"
                   f" {row.misfit(machines)}")  # fmt: skip


def _difference(found: Plan, other: Plan) -> str:
    best, before = other.best, found.best
    if best is None:
        return "nothing fits"
    rate = other.question.tokens_per_step / best.seconds
    text = f"{label(best)}, micro-batch {best.micro_batch} × {best.num_micro_batches}, {_seconds(best.seconds)} a step"
    if best.is_checkpointed:
        text += ", recomputed"
    if before is None:
        return f"{text}: it fits"
    return f"{text}: {rate / (found.question.tokens_per_step / before.seconds):.2f} × the tokens a second"


def show_fewest(fewest: Plan | None, num_tokens: float, days: float, most_nodes: int) -> None:
    """Print how many nodes the tokens take in so many days."""
    if fewest is None:
        click.echo(f"✗ no {most_nodes:,} nodes are enough for {format_count(num_tokens)} tokens in {days:g} days")
        return
    machines, best, needed = fewest.question.machines, fewest.fitting[0], fewest.days(num_tokens)
    click.echo(
        f"{format_count(num_tokens)} tokens in {days:g} days: {counted(machines.num_nodes, 'node')},"
        f" {machines.world_size:,} ranks, {needed:.1f} days with {label(best)}"
    )


def show_command(found: Plan, row: Row, script: Sequence[str], written: str | None, hostfile: str | None) -> None:
    """Print the config of a row, or where it was written, and the command that runs it."""
    machines = found.question.machines
    config = written or "ds_config.json"
    click.echo(f"written to {written}" if written else f"ds_config.json: {json.dumps(row.config())}")
    words = ["launch"]
    if hostfile is not None:
        words += ["--hostfile", hostfile]
    elif machines.num_nodes == 1:
        words += ["--num-gpus", str(machines.gpus_per_node)]
    else:
        words += ["sbatch", "--nodes", str(machines.num_nodes), "--gpus-per-node", str(machines.gpus_per_node)]
    own = config_argument(script)
    if own is None:
        script = [*script, "--deepspeed", config]
    elif written:
        script = [word.replace(own, config) if word.endswith(own) else word for word in script]
    click.echo(f"run it: {shlex.join([*words, *script])}")


def as_json(found: Plan, others: _Others, num_tokens: float | None) -> dict[str, Any]:
    """Return everything as plain data: bytes and seconds."""
    question = found.question
    return {
        "model": {"name": question.model.name, "num_params": question.model.num_params},
        "machines": asdict(question.machines) | {"hardware": question.hardware.name},
        "global_batch": question.global_batch,
        "guide": guide_says(question),
        "save": dict(zip(("bytes_per_node", "seconds"), save_of(question), strict=True)),
        "days": None if num_tokens is None else found.days(num_tokens),
        "rows": [_row_json(found, row) for row in found.of_each_kind()],
        "not_fitting": len(found.rows) - len(found.fitting),
        "what_if": [
            {"name": name, "value": text, "best": None if other.best is None else _row_json(other, other.best)}
            for name, text, other in others
        ],
    }


def _row_json(found: Plan, row: Row) -> dict[str, Any]:
    return {
        "label": label(row),
        "step_s": row.seconds,
        "parts_s": dict(row.time.parts),
        "samples_per_s": found.question.global_batch / row.seconds,
        "gpu_bytes": row.memory.device,
        "is_rehearsed": row.is_rehearsed,
        "host_bytes_per_node": row.host_per_node,
        "disk_bytes_per_node": row.disk_per_node,
        "micro_batch": row.micro_batch,
        "accumulation": row.num_micro_batches,
        "is_checkpointed": row.is_checkpointed,
        "reason": row.reason,
        "config": row.config(),
    }
