"""Mistakes on the command line in the form of all our errors: what is wrong, where, what to write instead."""

from __future__ import annotations

import click

from launcher.base.errors import UsageError, did_you_mean, nearest
from launcher.cli.options.accepted import without_counterpart
from launcher.cli.options.command import Option, spelled

_NO_COMMAND = "No such command "  # how click begins what it says of one


def as_usage_error(error: click.ClickException) -> UsageError:
    """Return what click has found wrong, as an error of ours."""
    if isinstance(error, click.NoSuchOption):
        return _no_such_option(error)
    if isinstance(error, click.MissingParameter):
        return UsageError(f"{_name(error) or 'an argument'} is missing", hint=_example(error) or _usage(error))
    if isinstance(error, click.BadOptionUsage):
        _, _, problem = error.message.rstrip(".").rpartition("' ")
        return UsageError(problem, where=spelled(error.option_name), hint=_usage(error))
    if isinstance(error, click.UsageError) and error.message.startswith(_NO_COMMAND):
        return _no_such_command(error)
    message = error.message[:1].lower() + error.message[1:].rstrip(".")
    if isinstance(error, click.BadParameter):
        expected, _, remedy = message.partition("; ")
        return UsageError(expected, where=_name(error), hint=remedy or None)
    return UsageError(message, hint=_usage(error) if isinstance(error, click.UsageError) else None)


def _no_such_option(error: click.NoSuchOption) -> UsageError:
    name = spelled(error.option_name)
    known = [spelled(option) for option in _spellings(error.ctx)]
    near = nearest(name, known, cutoff=0.7)
    hint = without_counterpart(name) or (f"did you mean {near}?" if near else _usage(error))
    return UsageError(f"there is no option {error.option_name}", hint=hint)


def _no_such_command(error: click.UsageError) -> UsageError:
    word = error.message.removeprefix(_NO_COMMAND).split("'")[1]
    group = error.ctx.command if error.ctx is not None else None
    known = group.list_commands(error.ctx) if isinstance(group, click.Group) and error.ctx is not None else []
    return UsageError(f"there is no command {word}", hint=did_you_mean(word, known) or _usage(error))


def _spellings(ctx: click.Context | None) -> list[str]:
    """Return the long options of a command, those that are shown."""
    parameters = ctx.command.params if ctx is not None else []
    return [spelling for one in parameters for spelling in one.opts if spelling.startswith("--")]


def _name(error: click.BadParameter) -> str | None:
    if isinstance(error.param, click.Option):
        return error.param.spelling if isinstance(error.param, Option) else max(error.param.opts, key=len)
    return error.param.make_metavar(error.ctx) if error.param is not None and error.ctx is not None else None


def _example(error: click.UsageError) -> str | None:
    """Return the first example of the command's help, None where it has none."""
    epilog = (error.ctx.command.epilog if error.ctx is not None else None) or ""
    line = next((line for line in epilog.splitlines() if line.startswith("  launch ")), None)
    return None if line is None else f"such as: {line.strip()}"


def _usage(error: click.UsageError) -> str | None:
    if error.ctx is None:
        return None
    path = error.ctx.command_path
    return f"{path} --help lists what there is"
