"""`launch config check`, `launch config elastic` and `launch config explain`."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from launcher.base.errors import ConfigError, did_you_mean, nearest
from launcher.base.exit_codes import ExitCode
from launcher.base.fields import Whole
from launcher.base.units import counted, printable
from launcher.cli.options.command import Number

if TYPE_CHECKING:
    from launcher.config.reference import KeyFacts

_TYPE = re.compile(r"\[(\w+)\]")  # in `optimizer.params[AdamW].lr`


@click.group("config")
def config_group() -> None:
    """Check an engine config, show its elastic batch, or explain a key."""


@config_group.command("check")
@click.argument("file")
@click.option(
    "--world-size",
    type=Number(Whole(1)),
    help="Ranks: checks the batch equation too.",
)
@click.option("--json", "as_json", is_flag=True, help="Print findings as JSON.")
def check(file: str, world_size: int | None, as_json: bool) -> None:
    """Show everything that is wrong with FILE, each with its place, and what it leaves open. Exit code 0 or 2."""
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
    for mark, color, findings in (("✗", "red", errors), ("!", "yellow", notices), ("·", "cyan", unknown)):
        for item in findings:
            where = f"{item.where}: " if item.where else ""
            click.echo(f"{click.style(mark, fg=color)} {printable(where + item.message)}", err=bool(errors))
            if item.hint:
                click.echo(f"  → {printable(item.hint)}", err=bool(errors))
    if errors:
        click.echo(f"{file}: {counted(len(errors), 'error')}", err=True)
    else:
        notes = f", {counted(len(notices), 'note')}" if notices else ""
        to_fill = f", {len(unknown)} for a Trainer to fill in" if unknown else ""
        click.echo(f"{click.style('✓', fg='green')} {file}: ok{notes}{to_fill}")


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
    """Explain KEY: type, default, meaning, status. KEY is a path such as zero_optimization.stage, or its end."""
    from launcher.config.reference import all_keys

    keys = all_keys()
    # As errors print them, too: without the type that `optimizer.params[AdamW].lr` has.
    names = {fact: (fact.path, _TYPE.sub("", fact.path), *fact.aliases) for fact in keys}
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
    for fact, types in _alike(found).items():
        path = fact.path.replace(".params.", f".params[{', '.join(types)}].") if types else fact.path
        click.echo(click.style(path, bold=True))
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


def _alike(found: list[KeyFacts]) -> dict[KeyFacts, list[str]]:
    """Return keys without the types of optimizers and schedulers they belong to, each with these types."""
    groups: dict[KeyFacts, list[str]] = {}
    for fact in found:
        types = groups.setdefault(dataclasses.replace(fact, path=_TYPE.sub("", fact.path)), [])
        types += _TYPE.findall(fact.path)
    return groups
