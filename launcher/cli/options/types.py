"""Types of options: each parses its text once, into the value that the code works with.

Their errors say what is expected; `--help` shows no limits.
"""

from __future__ import annotations

import math
import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from launcher.base.errors import UsageError
from launcher.base.resume import AUTO, NEVER
from launcher.cluster.cluster import NodeRange
from launcher.plan.plan import LONGEST_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from click.shell_completion import CompletionItem


class Whole(click.ParamType):  # type: ignore[type-arg]  # generic in the newest click only
    """A whole number within limits, both included."""

    name = "n"

    def __init__(self, least: int = 0, most: int | None = None) -> None:
        self._least, self._most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = int(value)
        except (TypeError, ValueError):
            number = self._least - 1
        if number < self._least or (self._most is not None and number > self._most):
            limits = f"of at least {self._least}" if self._most is None else f"from {self._least} to {self._most}"
            self.fail(f"expected a whole number {limits}, got {str(value)!r:.80}", param, ctx)
        return number


class Ranks(Whole):
    """A number of ranks, or torchrun's words for one: `gpu`, `cpu`, `auto`; other devices are `gpu`, too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("xpu", "npu"):
            return "gpu"
        return value if value in ("gpu", "cpu", "auto") else super().convert(value, param, ctx)


class Nodes(Whole):
    """A number of nodes, or torchrun's range of them: MIN:MAX."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, NodeRange):
            return value
        least, colon, most = str(value).partition(":")
        ends = [super(Nodes, self).convert(text, param, ctx) for text in ((least, most) if colon else (least, least))]
        if ends[0] > ends[1]:
            self.fail(f"expected MIN:MAX, got {value!r:.80}", param, ctx)
        return NodeRange(*ends)


class Seconds(click.ParamType):  # type: ignore[type-arg]  # as above
    """A length of time that ends."""

    name = "seconds"

    def __init__(self, least: float, *, min_open: bool = False) -> None:
        """min_open: `least` itself is too short."""
        self._least, self._min_open = least, min_open

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            seconds = math.nan
        is_enough = seconds > self._least if self._min_open else seconds >= self._least
        if not (is_enough and seconds <= LONGEST_S):
            limit = f"{'more than' if self._min_open else 'at least'} {self._least:g}"
            self.fail(f"expected seconds, {limit}, got {str(value)!r:.80}", param, ctx)
        return seconds


def whole_list(text: str) -> tuple[int, ...]:
    """Read whole numbers, separated by commas."""
    parts = [part.strip() for part in str(text).split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise click.BadParameter(f"expected whole numbers such as 0,1, got {text!r:.80}")
    return tuple(map(int, parts))


def core_list(text: str) -> tuple[int, ...]:
    """Read CPUs: 0-15,32. Raises: UsageError."""
    from launcher.cluster.cores import parse_core_list

    return parse_core_list(str(text))


def resume_from(text: str) -> str:
    """Read `auto`, `never`, or a folder, whose whole path is returned: ranks may start in another one."""
    if not text:
        raise click.BadParameter("names no folder; write --resume auto, --resume never or --resume DIR")
    return text if text in (AUTO, NEVER) or "://" in text else os.path.abspath(text)


_RESERVED_SIGNALS = {
    "SIGKILL": "no program can handle it",
    "SIGSTOP": "no program can handle it",
    "SIGCHLD": "it tells launch that a process of its own has ended",
    "SIGURG": "it asks ranks for their stacks",
    "SIGQUIT": "it asks for the stacks of all ranks, as `launch stacks` does",
    "SIGTSTP": "it suspends launch, and the ranks run on",
    "SIGCONT": "it ends a suspension",
    "SIGTTIN": "it stops who reads a terminal from the background",
    "SIGTTOU": "it stops who writes to a terminal from the background",
    "SIGPIPE": "it tells that the reader of what launch writes has ended",
    "SIGWINCH": "it tells that the size of the terminal has changed",
    **dict.fromkeys(
        ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGIOT", "SIGTRAP", "SIGSYS"),
        "it tells that launch itself has failed",
    ),
}


def signal_list(text: str) -> tuple[int, ...]:
    """Read names of signals, separated by commas. Raises: UsageError."""
    names = [name for name in (part.strip().upper() for part in str(text).split(",")) if name]
    return tuple(_signal_number(name if name.startswith("SIG") else f"SIG{name}") for name in names)


def _signal_number(name: str) -> int:
    if name not in signal.Signals.__members__:
        from launcher.base.errors import did_you_mean

        hint = did_you_mean(name, signal.Signals.__members__)
        raise UsageError(f"there is no signal {name}", where="--signals-to-handle", hint=hint)
    if name in _RESERVED_SIGNALS:
        raise UsageError(
            f"{name} cannot end a job in order: {_RESERVED_SIGNALS[name]}",
            where="--signals-to-handle",
            hint="name others, such as SIGINT,SIGTERM,SIGHUP",
        )
    return int(signal.Signals[name])


@dataclass(frozen=True)
class StreamSpec:
    """Streams of local ranks, as torchrun's --redirects and --tee name them: bit 1 is stdout, bit 2 stderr."""

    every: int = 0  # of every rank
    by_local_rank: Mapping[int, int] = field(default_factory=dict)  # in place of `every`

    def has(self, local_rank: int, stream: str) -> bool:
        """Whether a rank's "stdout" or "stderr" is among them."""
        return bool(self.by_local_rank.get(local_rank, self.every) & (1 if stream == "stdout" else 2))


NO_STREAMS = StreamSpec()


def streams(text: str) -> StreamSpec:
    """Read which streams: 0 to 3 for all ranks, or LOCAL_RANK:0..3 for some."""
    if text in ("0", "1", "2", "3"):
        return StreamSpec(int(text))
    found: dict[int, int] = {}
    for part in str(text).split(","):
        local_rank, _, bits = part.strip().partition(":")
        if not (local_rank.isascii() and local_rank.isdigit() and bits in ("0", "1", "2", "3")):
            raise click.BadParameter(f"expected 0 to 3, or such as 0:1,1:3 by local rank, got {str(text)!r:.80}")
        found[int(local_rank)] = int(bits)
    return StreamSpec(0, found)


def files(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the names of files: for arguments that are another program's."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]
