"""How the options of our commands are declared, spelled, read and listed.

An option has one spelling that is shown, in kebab-case. `_` stands for `-` in whatever a user types (`spelled`), which
is DeepSpeed's way; other launchers' names for it are accepted, and listed in docs/options.md only.
"""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from launcher.base.errors import UsageError, did_you_mean
from launcher.base.fields import Limit, Seconds, Whole, named, naming, option_of
from launcher.base.units import parse_bytes
from launcher.plan.request import check_signals

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_F = TypeVar("_F", bound=Callable[..., Any])
_OTHERS = "Options"
# In this order, by use; others come last.
HEADINGS = ("Ranks", "Hosts", "Failure", "Output", "Environment", "SSH", "Compatibility")
_SHOWS_ALL = "launcher.help_all"  # key of click's `Context.meta`


def place_of(heading: str) -> int:
    """Return where a heading comes among the others: for sorting."""
    return HEADINGS.index(heading) if heading in HEADINGS else len(HEADINGS)


def spelled(name: str) -> str:
    """Return the name of an option as it is declared: for click's `token_normalize_func`."""
    return name.replace("_", "-")


class Option(click.Option):
    """An option that `--help` lists under a heading, and that other names may stand for."""

    def __init__(self, *args: Any, heading: str = _OTHERS, also: Sequence[str] = (), **attributes: Any) -> None:
        """also: spellings that are accepted and not shown."""
        super().__init__(*args, **attributes)
        self.heading = heading
        self.also = tuple(also)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        shown = self.opts
        self.opts = [*shown, *self.also]  # click asks for them here, and shows them elsewhere
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = shown

    @property
    def spelling(self) -> str:
        """The one name that messages use: the longest, so not that of one letter."""
        return max(self.opts, key=len)


def option(
    *declarations: str, heading: str = _OTHERS, also: Sequence[str] = (), **attributes: Any
) -> Callable[[_F], _F]:
    """Declare an `Option` as `click.option` does."""
    return click.option(*declarations, cls=Option, heading=heading, also=also, **attributes)


def under(heading: str) -> Callable[..., Callable[[_F], _F]]:
    """Return what declares options that are listed under a heading."""
    return functools.partial(option, heading=heading)


def declared(options: Sequence[Callable[[Any], Any]]) -> Callable[[_F], _F]:
    """Return what adds options and arguments to a click command, in this order."""

    def declare(function: _F) -> _F:
        for one in reversed(options):
            function = one(function)
        return function

    return declare


def given_words(ctx: click.Context) -> list[str]:
    """Return the options that were given of those declared as `Option`, as words for another command that has them."""
    words: list[str] = []
    for param in ctx.command.params:
        is_given = ctx.get_parameter_source(str(param.name)) in (
            ParameterSource.COMMANDLINE,
            ParameterSource.ENVIRONMENT,
        )
        if isinstance(param, Option) and is_given:
            value = ctx.params[str(param.name)]
            if param.is_flag:
                words += [param.spelling] if value else []
            else:
                words += [param.spelling, str(value)]
    return words


class Command(click.Command):
    """A command whose options are listed under their headings, in the order of declaration."""

    def __init__(self, *args: Any, details: Sequence[str] = (), **attributes: Any) -> None:
        """details: headings that --help leaves out, and --help-all, which there is then, shows."""
        super().__init__(*args, **attributes)
        self._details = details

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Until the command ends, errors call a field what the option is called that fills it.
        spellings = {one.name: one.spelling for one in self.params if isinstance(one, Option)}
        token = naming.set(lambda name: spellings.get(name) or option_of(name))
        ctx.call_on_close(lambda: naming.reset(token))
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        params = super().get_params(ctx)
        return [*params, self._help_all()] if self._details else params

    def _help_all(self) -> click.Option:
        def show(ctx: click.Context, _: click.Parameter, value: bool) -> None:
            if value and not ctx.resilient_parsing:
                ctx.meta[_SHOWS_ALL] = True
                click.echo(ctx.get_help(), color=ctx.color)
                ctx.exit()

        text = f"Show the options about {' and '.join(self._details)}, too."
        return click.Option(["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=show, help=text)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete an option in the spelling that was begun: with `_`, or with `-`."""
        is_option = incomplete.startswith("--")
        found = super().shell_complete(ctx, spelled(incomplete) if is_option else incomplete)
        if is_option and "_" in incomplete:
            for item in found:
                item.value = "--" + item.value.removeprefix("--").replace("-", "_")
        return found

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                rows.setdefault(getattr(parameter, "heading", _OTHERS), []).append(record)
        hidden = () if ctx.meta.get(_SHOWS_ALL) else self._details
        for heading in sorted(set(rows).difference(hidden), key=place_of):
            with formatter.section(heading):
                formatter.write_dl(rows[heading])


# ---- Types: each reads its text once, into the value that the code works with ----


class Number(click.ParamType):  # type: ignore[type-arg]  # generic in the newest click only
    """What a limit allows: a whole number, seconds, an address."""

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self.name = "seconds" if isinstance(limit, Seconds) else "n" if isinstance(limit, Whole) else "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        with contextlib.suppress(TypeError, ValueError):
            number = self._limit.of(value)
            if self._limit.allows(number):
                return number
        self.fail(f"expected {self._limit}, got {str(value)!r:.80}", param, ctx)


class Ranks(Number):
    """A number of ranks, or torchrun's words for one: `gpu`, `cpu`, `auto`; other devices are `gpu`, too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert("gpu" if value in ("xpu", "npu") else value, param, ctx)


def memory_size(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    """Read a size of a memory, 80GB or 80GiB: the callback of an option."""
    found = None if value is None else parse_bytes(value)
    if value is not None and (found is None or not 2**20 <= found <= 2**60):
        raise click.BadParameter(f"{value!r} is not a size of a memory; write 80GB or 80GiB.")
    return found


def core_list(text: str) -> tuple[int, ...]:
    """Read CPUs: 0-15,32. Raises: UsageError."""
    from launcher.cluster.cores import parse_core_list

    return parse_core_list(str(text))


def signal_list(text: str) -> tuple[int, ...]:
    """Read names of signals, separated by commas, with or without SIG. Raises: UsageError."""
    known = signal.Signals.__members__
    found: list[int] = []
    for name in filter(None, (part.strip().upper() for part in str(text).split(","))):
        name = name if name.startswith("SIG") else f"SIG{name}"
        if name not in known:
            hint = did_you_mean(name, known)
            raise UsageError(f"there is no signal {name}", where=named("stop_signals"), hint=hint)
        found.append(int(known[name]))
    check_signals(found)
    return tuple(found)


def files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the names of files: for arguments that are another program's."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]
