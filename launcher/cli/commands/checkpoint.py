"""`launch checkpoint`: look at checkpoints, verify them, and remove those that are not needed."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.base.errors import CheckpointError, UsageError
from launcher.base.exit_codes import ExitCode
from launcher.base.fields import Whole
from launcher.base.units import counted, format_bytes, format_count, printable
from launcher.cli.commands.checkpoint_tools import COMMANDS
from launcher.cli.console.streams import show_table
from launcher.cli.options.command import Command, Number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.checkpoint_files.place import Place
    from launcher.checkpoint_files.retention import Leftover
    from launcher.checkpoint_files.summary import ParamFacts, Summary
    from launcher.checkpoint_files.verify import Finding

_INSPECT_EPILOG = """\b
examples:
  launch checkpoint inspect checkpoints
  launch checkpoint inspect checkpoints/global_step500 --params

\b
exit codes: 0 all can be read · 1 one is damaged
"""
_VERIFY_EPILOG = """\b
examples:
  launch checkpoint verify checkpoints
  launch checkpoint verify checkpoints/global_step500 --json

\b
exit codes: 0 everything is as it was saved · 1 something is damaged or missing
"""
_PRUNE_EPILOG = """\b
examples:
  launch checkpoint prune checkpoints --keep-last 3 --dry-run
  launch checkpoint prune checkpoints --keep-last 3 --keep-every 10000
"""


class _Folder(click.Path):
    """A local folder, or one in a store by its URL."""

    def __init__(self) -> None:
        super().__init__(exists=True, file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str) or "://" not in value:
            return super().convert(value, param, ctx)
        from launcher.checkpoint_files.place import place_of

        place = place_of(value)
        if not place.is_dir():
            raise CheckpointError("there is no such folder", where=value)
        return place


_folder_argument = click.argument("path", metavar="PATH", type=_Folder())


@click.group("checkpoint")
def checkpoint_group() -> None:
    """List, verify, remove or convert checkpoints. PATH and DIR are folders of checkpoints or one of them."""


for _command in COMMANDS:
    checkpoint_group.add_command(_command)


@checkpoint_group.command("inspect", cls=Command, epilog=_INSPECT_EPILOG, short_help="Show what checkpoints hold.")
@_folder_argument
@click.option("--params", "shows_params", is_flag=True, help="List the parameters; of the newest, if PATH has several.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
@click.pass_context
def inspect(ctx: click.Context, path: Place, shows_params: bool, as_json: bool) -> None:
    """Show step, date, size, ranks, stage, precision, optimizer and parameters of the checkpoints in PATH."""
    found, damaged, latest = _summaries(path)
    is_one = _is_checkpoint(path)
    if as_json:
        checkpoints = [_plain(each, latest, with_params=shows_params) for each in found]
        click.echo(json.dumps({"path": str(path), "checkpoints": checkpoints, "damaged": damaged}, indent=2))
    elif is_one or (shows_params and found):
        _show_one(found[-1], shows_params=shows_params)
        _show_damaged({} if is_one else damaged)
    else:
        _show_all(path, found, damaged, latest)
    ctx.exit(ExitCode.FAILURE if damaged and not is_one else ExitCode.OK)


@checkpoint_group.command("verify", cls=Command, epilog=_VERIFY_EPILOG, short_help="Read everything, find damage.")
@_folder_argument
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.pass_context
def verify(ctx: click.Context, path: Place, as_json: bool) -> None:
    """Read every file of the checkpoints in PATH: sizes, checksums, and that every element is there exactly once."""
    from launcher.checkpoint_files.verify import verify as verify_one

    rows = [(folder, verify_one(folder)) for folder in _checkpoints(path)]
    is_sound = not any(findings for _, findings in rows)
    if as_json:
        plain = [{"checkpoint": str(folder), "findings": [vars(each) for each in found]} for folder, found in rows]
        click.echo(json.dumps({"path": str(path), "ok": is_sound, "checkpoints": plain}, indent=2))
    else:
        width = max(len(folder.name) for folder, _ in rows)
        for folder, findings in rows:
            _show_findings(folder, findings, width)
    ctx.exit(ExitCode.OK if is_sound else ExitCode.FAILURE)


@checkpoint_group.command("prune", cls=Command, epilog=_PRUNE_EPILOG, short_help="Remove old checkpoints, leftovers.")
@click.argument("path", metavar="DIR", type=_Folder())
@click.option("--keep-last", type=Number(Whole(1)), metavar="N", help="Keep the N newest. Default: all.")
@click.option("--keep-every", type=Number(Whole(1)), metavar="K", help="Keep those whose step is a multiple of K, too.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed and stop.")
def prune(path: Place, keep_last: int | None, keep_every: int | None, dry_run: bool) -> None:
    """Remove what is not to be kept of the checkpoints in DIR, and what saves that were killed left behind.

    The checkpoint that `latest` names is never removed. Leftovers that something was written to in the last quarter
    of an hour may belong to a save that still runs, and are left alone.
    """
    from launcher.checkpoint_files import retention

    if keep_every is not None and keep_last is None:
        raise UsageError("--keep-every goes with --keep-last", hint="without it all checkpoints are kept anyway")
    if _is_checkpoint(path):
        raise UsageError("this is one checkpoint", where=str(path), hint=f"name the folder it is in: {path.parent}")
    wish = None if keep_last is None else retention.Retention(keep_last, keep_every)
    old = [] if wish is None else retention.superseded(path, wish)
    rows = [(str(each.path), retention.num_bytes_of(each.path)) for each in old]
    if not dry_run:
        for each in old:
            retention.remove(each)
    left = retention.leftovers(path)
    for leftover in left:
        if leftover.may_be_in_use:
            _say_in_use(leftover)
            continue
        rows.append((str(leftover.path), leftover.num_bytes))
        if not dry_run:
            retention.remove_leftover(leftover)
    done = "would remove" if dry_run else "removed"
    for name, num_bytes in rows:
        click.echo(printable(f"{done} {name}  {format_bytes(num_bytes)}"))
    click.echo(
        f"{done} {format_bytes(sum(num_bytes for _, num_bytes in rows))} in all" if rows else "nothing to remove"
    )


def _say_in_use(leftover: Leftover) -> None:
    sign, path = click.style("! ", fg="yellow"), printable(str(leftover.path))
    click.echo(f"{sign}{path} was written to {leftover.age_s:.0f} s ago: left alone, a save may still run")


def _is_checkpoint(path: Place) -> bool:
    from launcher.checkpoint_files.manifest import MANIFEST

    return (path / MANIFEST).exists()


def _checkpoints(path: Place) -> list[Place]:
    """Return the folders of the checkpoints that PATH means, damaged ones too. Raises: CheckpointError for none."""
    if _is_checkpoint(path):
        return [path]
    found = [each for each in path.iterdir() if not each.name.startswith(".") and _is_checkpoint(each)]
    found.sort(key=lambda each: [(len(part), part) for part in re.split(r"(\d+)", each.name)])  # step 2 before step 10
    if not found:
        hint = "name a folder of checkpoints, or one of them; `launch checkpoint import` reads those of DeepSpeed"
        raise CheckpointError("there is no checkpoint of launch", where=str(path), hint=hint)
    return found


def _summaries(path: Place) -> tuple[list[Summary], dict[str, str], str | None]:
    """Return what the checkpoints in PATH say, newest last, what is wrong with others, and what `latest` names."""
    from launcher.checkpoint_files.folder import latest_tag
    from launcher.checkpoint_files.summary import summary_of

    found, damaged, latest = [], {}, None
    for folder in _checkpoints(path):
        try:
            found.append(summary_of(folder))
        except CheckpointError as error:
            if folder == path:
                raise
            damaged[folder.name] = str(error)
    try:
        latest = latest_tag(path.absolute().parent if _is_checkpoint(path) else path)
    except CheckpointError as error:
        damaged["latest"] = str(error)
    return sorted(found, key=lambda each: (each.manifest.created, each.manifest.step)), damaged, latest


def _plain(each: Summary, latest: str | None, *, with_params: bool) -> dict[str, Any]:
    manifest = each.manifest
    plain: dict[str, Any] = {
        "tag": manifest.tag,
        "path": str(each.path),
        "is_latest": manifest.tag == latest,
        "created": manifest.created,
        "step": manifest.step,
        "counters": each.counters,
        "num_bytes": each.num_bytes,
        "num_files": len(manifest.files),
        "world_size": manifest.world_size,
        "stage": each.stage,
        "precision": each.precision,
        "optimizer": each.optimizer,
        "num_params": len(each.params),
        "numel": each.numel,
        "versions": each.versions,
    }
    if with_params:
        plain["params"] = [vars(param) | {"numel": param.numel} for param in each.params]
    return plain


def _local_time(created: str) -> str:
    try:
        return datetime.fromisoformat(created).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return created


def _show_all(path: Place, found: Sequence[Summary], damaged: dict[str, str], latest: str | None) -> None:
    header = ("TAG", "STEP", "SAVED", "SIZE", "RANKS", "STAGE", "PRECISION", "OPTIMIZER", "PARAMETERS", "")
    rows: list[tuple[str, ...]] = [header]
    rows += [_row(each, latest) for each in found]
    show_table(rows, right=(1, 3, 4, 5))
    _show_damaged(damaged)
    total = format_bytes(sum(each.num_bytes for each in found))
    click.echo(f"{path}: {counted(len(found), 'checkpoint')}, {total}" + (f", {len(damaged)} ✗" if damaged else ""))


def _show_damaged(damaged: dict[str, str]) -> None:
    for name, problem in damaged.items():
        click.echo(click.style("✗ ", fg="red") + printable(f"{name}: {problem}"))


def _row(each: Summary, latest: str | None) -> tuple[str, ...]:
    manifest = each.manifest
    return (
        manifest.tag,
        str(manifest.step),
        _local_time(manifest.created),
        format_bytes(each.num_bytes),
        str(manifest.world_size),
        "?" if each.stage is None else str(each.stage),
        each.precision,
        each.optimizer or "none",
        f"{len(each.params)} ({format_count(each.numel)})",
        "latest" if manifest.tag == latest else "",
    )


def _show_one(each: Summary, *, shows_params: bool) -> None:
    manifest = each.manifest
    num_trained = sum(param.is_trainable for param in each.params)
    frozen = len(each.params) - num_trained
    counters = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in each.counters.items())
    click.echo(click.style(printable(f"{manifest.tag} · step {manifest.step}"), bold=True))
    ranks = counted(manifest.world_size, "rank")
    facts = {
        "saved": f"{_local_time(manifest.created)}, by {ranks} at ZeRO stage {each.stage}",
        "size": f"{format_bytes(each.num_bytes)} in {len(manifest.files)} files",
        "parameters": f"{len(each.params)}, {format_count(each.numel)} elements, {each.precision}"
        + (f"; {frozen} frozen" if frozen else ""),
        "optimizer": each.optimizer or "none",
        "counters": counters,
        "versions": ", ".join(f"{name} {version}" for name, version in each.versions.items()),
    }
    for name, text in facts.items():
        if text:
            click.echo(printable(f"  {name:<10}  {text}"))
    if shows_params:
        _show_params(each.params)


def _show_params(params: Sequence[ParamFacts]) -> None:
    rows = [("UNIT", "PARAMETER", "SHAPE", "ELEMENTS", "TYPE", "STATES")]
    for param in params:
        states = ", ".join(param.states) if param.is_trainable else "frozen"
        shape = "×".join(map(str, param.shape)) or "scalar"
        rows.append((str(param.unit), param.name, shape, str(param.numel), param.dtype, states))
    show_table(rows, right=(0, 3))


def _show_findings(folder: Place, findings: Sequence[Finding], width: int) -> None:
    if not findings:
        click.echo(f"{printable(folder.name):<{width}}  {click.style('ok', fg='green')}")
    for finding in findings:
        where = f"{printable(folder.name):<{width}}"
        click.echo(f"{where}  {click.style('✗', fg='red')}   {printable(str(finding))}")
