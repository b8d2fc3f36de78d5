"""Types of options that hold numbers. Their errors say what is expected; `--help` shows no limits."""

from __future__ import annotations

import math
from typing import Any

import click

_LONGEST_S = 10 * 366 * 24 * 3600.0  # ten years: a deadline of `inf` is none


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
    """A number of ranks, or torchrun's words for one: `gpu`, `cpu`, `auto`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value in ("gpu", "cpu", "auto") else super().convert(value, param, ctx)


class Nodes(Whole):
    """A number of nodes; torchrun's range of them says what to write in its place."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        least, colon, most = str(value).partition(":")
        if colon and least.isdigit() and most.isdigit():
            self.fail(
                f"expected one number, got a range; write --num-nodes {most} --min-nodes {least} --max-restarts N",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


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
        if not (is_enough and seconds <= _LONGEST_S):
            limit = f"{'more than' if self._min_open else 'at least'} {self._least:g}"
            self.fail(f"expected seconds, {limit}, got {str(value)!r:.80}", param, ctx)
        return seconds
