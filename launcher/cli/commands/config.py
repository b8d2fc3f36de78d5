"""`launch config check`, `launch config elastic` and `launch config explain`."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from launcher.base.errors import ConfigError
from launcher.base.exit_codes import ExitCode
from launcher.base.suggest import did_you_mean, nearest
from launcher.base.units import counted, printable
from launcher.cli.options.types import Whole


@click.group("config")
def config_group() -> None:
    """Check an engine config, show its elastic batch, or explain a key."""


@config_group.command("check")
@click.argument("file")
@click.option(
    "--world-size",
    type=Whole(1),
    help="Ranks: checks the batch equation too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print findings as JSON.")
def check(file: str, world_size: int | None, as_json: bool) -> None:
    """Say everything that is wrong with FILE, each with its place, and what it leaves open. Exit code 0 or 2."""
    from launcher.config.auto import left_open
    from launcher.config.load import load_config

    errors: tuple[Any, ...] = ()
    notices: tuple[Any, ...] = ()
    unknown: tuple[Any, ...] = ()
    try:
        loaded = load_config(file, world_size=world_size)
        notices, unknown = loaded.notices, left_open(loaded.config)
    except ConfigError as error:
        errors = error.diagnostics
    if as_json:
        found = {"errors": errors, "notices": notices, "left_open": unknown}
        click.echo(json.dumps({kind: [vars(item) for item in items] for kind, items in found.items()}, indent=2))
    else:
        _show(file, errors, notices, unknown)
    if errors:
        sys.exit(ExitCode.USAGE)


def _show(file: str, errors: tuple[Any, ...], notices: tuple[Any, ...], unknown: tuple[Any, ...]) -> None:
    findings = [*errors, *notices, *unknown]
    places = max((len(item.where or "") for item in findings), default=0)
    messages = min(60, max((len(item.message) for item in findings), default=0))
    for item in findings:
        line = f"{item.where or '':<{places}}  {item.message:<{messages}}"
        click.echo(printable(f"{line}  {item.hint}" if item.hint else line.rstrip()), err=bool(errors))
    if errors:
        click.echo(counted(len(errors), "error"), err=True)
    else:
        notes = f", {counted(len(notices), 'note')}" if notices else ""
        to_fill = f", {len(unknown)} for a Trainer to fill in" if unknown else ""
        click.echo(f"{file}: ok{notes}{to_fill}")


@config_group.command("elastic")
@click.argument("file")
@click.option("--json", "as_json", is_flag=True, help="Print the batch and the worlds as JSON.")
def elastic(file: str, as_json: bool) -> None:
    """Show the batch that FILE's elasticity section chooses, and every world size it fits."""
    from launcher.config.elastic import elastic_batch_of
    from launcher.config.load import load_config

    batch = elastic_batch_of(load_config(file).config)
    if batch is None:
        raise ConfigError("elasticity is off", where=file, hint='set "enabled" to true in its "elasticity" section')
    plans = [(size, batch.plan_for(size)) for size in batch.world_sizes]
    if as_json:
        rows = [
            {
                "world_size": size,
                "train_micro_batch_size_per_gpu": plan.micro_batch_size,
                "gradient_accumulation_steps": plan.accumulation_steps,
            }
            for size, plan in plans
        ]
        click.echo(json.dumps({"train_batch_size": batch.train_batch_size, "worlds": rows}, indent=2))
        return
    click.echo(f"{file}: batch {batch.train_batch_size} fits {batch.range_text}")
    click.echo("world size  micro-batch  accumulation steps")
    for size, plan in plans:
        click.echo(f"{size:>10}  {plan.micro_batch_size:>11}  {plan.accumulation_steps:>18}")


@config_group.command("explain")
@click.argument("key")
@click.option("--json", "as_json", is_flag=True, help="Print facts as JSON.")
def explain(key: str, as_json: bool) -> None:
    """Say what KEY means: type, default, meaning, status. KEY is a path such as zero_optimization.stage, or its end."""
    from launcher.config.reference import all_keys

    keys = all_keys()
    names = {fact: (fact.path, *fact.aliases) for fact in keys}
    found = [fact for fact in keys if key in names[fact]]
    found = found or [fact for fact in keys if any(f".{name}".endswith(f".{key}") for name in names[fact])]
    if not found:
        choices = {name: name for fact in keys for name in names[fact]}
        choices |= {fact.path.rpartition(".")[2]: fact.path for fact in reversed(keys)}
        near = nearest(key, choices)
        hint = f'did you mean "{choices[near]}"?' if near else did_you_mean(key, choices)
        raise ConfigError(f'unknown key "{key}"', hint=hint or "see docs/config.md")
    if as_json:
        click.echo(json.dumps([vars(fact) for fact in found], indent=2))
        return
    for fact in found:
        click.echo(click.style(fact.path, bold=True))
        click.echo(f"  {fact.doc}")
        rows = {
            "type": fact.type,
            "default": fact.default,
            "status": fact.status,
            "also": ", ".join(fact.aliases),
        }
        for name, text in rows.items():
            if text:
                click.echo(f"  {name:<8} {text}")
