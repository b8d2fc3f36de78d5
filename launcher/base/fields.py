"""What a user may set: fields with the names of options, what they may hold, and what messages call them.

A field has one name from the option to the code that obeys it, so that no line copies it from one to the next. Each way
to set it has its own spelling: an error names the field by `named`, and whoever was called has said how that reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")
MAX_PORT = 65_535
_LONGEST_S = 10 * 366 * 24 * 3600.0  # ten years: a deadline of `inf` is none


def option_of(name: str) -> str:
    """Return the option of `launch` that sets a field, where it has the field's name."""
    return f"--{name.replace('_', '-')}"


# Threads that connect to hosts, write logs or show output run in a copy of the context that started them.
naming: ContextVar[Callable[[str], str]] = ContextVar("naming", default=option_of)


def named(name: str) -> str:
    """Return what messages call a field: `--num-gpus`; `ranks=` where `launcher.run` was called."""
    return naming.get()(name)


def filled(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """Return a dataclass with those of `values` that are fields of it; of the others its defaults hold."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names if name in values})


@dataclass(frozen=True)
class Whole:
    """Whole numbers within limits, both included, or one of some words."""

    least: int = 0
    most: int | None = None
    words: tuple[str, ...] = ()

    def allows(self, value: object) -> bool:
        """Whether a field may hold the value."""
        if not isinstance(value, int) or isinstance(value, bool):
            return value in self.words
        return self.least <= value and (self.most is None or value <= self.most)

    def of(self, text: str) -> int | str:
        """Return what a text means. Raises: ValueError."""
        return text if text in self.words else int(text)

    def __str__(self) -> str:
        limits = f"of at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
        return f"a whole number {limits}" + (f", or {', '.join(self.words)}" if self.words else "")


@dataclass(frozen=True)
class Seconds:
    """Lengths of time that end."""

    least: float
    is_open: bool = False  # `least` itself is too short

    def allows(self, value: object) -> bool:
        """Whether a field may hold the value."""
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return False
        return (value > self.least if self.is_open else value >= self.least) and value <= _LONGEST_S

    def of(self, text: str) -> float:
        """Return what a text means. Raises: ValueError."""
        return float(text)

    def __str__(self) -> str:
        return f"seconds, {'more than' if self.is_open else 'at least'} {self.least:g}"


Limit = Whole | Seconds
