"""Every command and option as text, read from the commands themselves: `docs/options.md` and the man pages.

`make docs` and `make man` run it; `make lint` compares the page with the commands.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from launcher import __version__
from launcher.cli.main import COMMANDS, EPILOG, SUMMARY, cli
from launcher.cli.options.command import place_of

_PROGRAM = "launch"
_OTHERS = "Options"  # heading of what has none
_DEFAULT_COMMAND = "run"  # `launch SCRIPT` means it, so its options are those of `launch` itself


@dataclass(frozen=True)
class OptionFacts:
    """What there is to know about one option."""

    spelling: str  # as `--help` shows it, with its metavar
    help: str
    also: tuple[str, ...]  # spellings that are accepted and not shown


@dataclass(frozen=True)
class CommandFacts:
    """What there is to know about one command."""

    name: str  # `launch`, `launch config check`
    summary: str
    usage: str
    paragraphs: tuple[str, ...]
    options: dict[str, list[OptionFacts]]  # by heading
    subcommands: tuple[tuple[str, str], ...]  # whole name and summary
    epilog: str  # examples, line by line


def all_commands() -> list[CommandFacts]:
    """Return the facts about every command, `launch` itself first, groups before their subcommands."""
    root = click.Context(cli, info_name=_PROGRAM)
    run = _command(root, _DEFAULT_COMMAND)
    context = click.Context(run, info_name=_PROGRAM)
    names = [name for name in COMMANDS if name != _DEFAULT_COMMAND]
    subcommands = tuple((f"{_PROGRAM} {name}", COMMANDS[name].short_help) for name in names)
    found = [_facts(context, SUMMARY, subcommands, EPILOG)]
    for name in names:
        found += _walk(_command(root, name), name, root)
    return found


def _command(context: click.Context, name: str) -> click.Command:
    group = context.command
    command = group.get_command(context, name) if isinstance(group, click.Group) else None
    assert command is not None
    return command


def _walk(command: click.Command, name: str, parent: click.Context) -> Iterator[CommandFacts]:
    context = click.Context(command, info_name=name, parent=parent)
    names = command.list_commands(context) if isinstance(command, click.Group) else []
    inner = [(one, _command(context, one)) for one in names]
    listed = tuple((f"{context.command_path} {one}", child.get_short_help_str(200)) for one, child in inner)
    yield _facts(context, command.get_short_help_str(200), listed)
    for one, child in inner:
        yield from _walk(child, one, context)


def _facts(
    context: click.Context, summary: str, subcommands: tuple[tuple[str, str], ...], epilog: str = ""
) -> CommandFacts:
    command = context.command
    options: dict[str, list[OptionFacts]] = {}
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None and "--help" not in parameter.opts:
            facts = OptionFacts(*record, also=getattr(parameter, "also", ()))
            options.setdefault(getattr(parameter, "heading", _OTHERS), []).append(facts)
    text = inspect.cleandoc(command.help or "").replace("\b\n", "").replace("\f", "")
    paragraphs = tuple(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    epilog = inspect.cleandoc(epilog or command.epilog or "").replace("\b\n", "")
    options = {heading: options[heading] for heading in sorted(options, key=place_of)}
    return CommandFacts(context.command_path, summary, usage, paragraphs, options, subcommands, epilog)


def markdown() -> str:
    """Return `docs/options.md`."""
    lines = [
        "# Commands and options",
        "",
        "Generated from the commands by `make docs`; `make man` writes the same as man pages. What they are for is in",
        "[launching](launch.md), [output](output.md), [failures](failures.md), [schedulers](schedulers.md),",
        "[hostfiles](hostfiles.md), [Slurm](slurm.md) and [tools](tools.md).",
        "",
        "In the name of an option `_` and `-` are the same. Options stand before SCRIPT. Every command has `--help`.",
        "",
    ]
    for command in all_commands():
        lines += [f"## {command.name}", "", "```", command.usage, "```", ""]
        for paragraph in command.paragraphs:
            lines += [_escaped(paragraph), ""]
        if command.subcommands:
            lines += ["| command | what it does |", "|---|---|"]
            lines += [f"| [`{name}`](#{name.replace(' ', '-')}) | {about} |" for name, about in command.subcommands]
            lines += [""]
        for heading, options in command.options.items():
            lines += [f"| {heading} | what it does |", "|---|---|", *map(_row, options), ""]
        lines += ["```", command.epilog, "```", ""] if command.epilog else []
    return "\n".join(lines).rstrip("\n") + "\n"


def _escaped(text: str) -> str:
    """Return text in which Markdown finds nothing of its own but code."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):  # outside of code
        parts[index] = "".join(f"\\{sign}" if sign in "\\*_<[" else sign for sign in parts[index])
    return "`".join(parts)


def _row(option: OptionFacts) -> str:
    also = ", ".join(f"`{name}`" for name in option.also)
    text = _escaped(option.help) + (f" Also {also}." if also else "")
    spelling, text = (cell.replace("|", "\\|") for cell in (option.spelling, text))
    return f"| `{spelling}` | {text} |"


def man_pages() -> dict[str, str]:
    """Return the man pages of section 1 by file name, one for each command."""
    pages = {}
    for command in all_commands():
        page = command.name.replace(" ", "-")
        title = f'.TH "{page.upper()}" 1 "" "launch {__version__}" "launch"'
        parts = [title, ".SH NAME", _roff(f"{page} - {command.summary.rstrip('.')}"), ".SH SYNOPSIS"]
        parts += [f".B {_roff(command.name)}", _roff(command.usage.removeprefix(command.name).strip())]
        parts += [".SH DESCRIPTION", *_separated([_roff(paragraph) for paragraph in command.paragraphs])]
        for heading, options in command.options.items():
            parts += [f".SH {heading.upper()}"]
            for option in options:
                also = f" Also {', '.join(option.also)}." if option.also else ""
                parts += [".TP", f".B {_roff(option.spelling)}", _roff(option.help + also)]
        if command.subcommands:
            parts += [".SH COMMANDS"]
            for name, about in command.subcommands:
                parts += [".TP", f".BR {_roff(name.replace(' ', '-'))} (1)", _roff(about)]
        if command.epilog:
            parts += [".SH NOTES", ".nf", *map(_roff, command.epilog.splitlines()), ".fi"]
        pages[f"{page}.1"] = "\n".join(parts) + "\n"
    return pages


def _separated(paragraphs: Sequence[str]) -> list[str]:
    return [line for paragraph in paragraphs for line in (".PP", paragraph)][1:]


def _roff(text: str) -> str:
    """Return a line of text in which roff finds no request of its own."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def main(arguments: Sequence[str]) -> None:
    """Print `docs/options.md`, or write the man pages into the folder that is named."""
    if not arguments:
        sys.stdout.write(markdown())
        return
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in man_pages().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
