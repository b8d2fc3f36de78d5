"""Types of options that hold numbers."""

from __future__ import annotations

import math
from typing import Any

import click

_LONGEST_S = 10 * 366 * 24 * 3600.0  # ten years


class Seconds(click.FloatRange):
    """A length of time that ends: FloatRange lets `nan` through, and a deadline of `inf` is none."""

    def __init__(self, least: float, *, min_open: bool = False) -> None:
        super().__init__(min=least, max=_LONGEST_S, min_open=min_open)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is no number of seconds.", param, ctx)
        return seconds
