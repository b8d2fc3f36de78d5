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


@dataclass(frozen=True)
class Address:
    """Where to listen: a port of this machine alone, or ADDRESS:PORT for others; 0 is a free port."""

    def allows(self, value: object) -> bool:
        """Whether a field may hold the value."""
        try:
            address_of(value)
        except ValueError:
            return False
        return True

    def of(self, text: str) -> str:
        """Return what a text means."""
        return text

    def __str__(self) -> str:
        return f"PORT or ADDRESS:PORT, a port from 0 to {MAX_PORT}"


def address_of(value: object) -> tuple[str, int]:
    """Return address and port of what `Address` allows. Raises: ValueError."""
    host, colon, port = str(value).rpartition(":")
    host = host.removeprefix("[").removesuffix("]")  # of IPv6
    is_port = port.isascii() and port.isdigit() and int(port) <= MAX_PORT
    if not is_port or isinstance(value, (bool, float)) or bool(colon) != bool(host) or " " in host:
        raise ValueError(f"{value!r} is no address")
    return host or "127.0.0.1", int(port)


@dataclass(frozen=True)
class Url:
    """A server that is reached by HTTP, or one of some words."""

    words: tuple[str, ...] = ()

    def allows(self, value: object) -> bool:
        """Whether a field may hold the value."""
        if not isinstance(value, str) or value in self.words:
            return value in self.words
        scheme, _, rest = value.partition("://")
        return scheme in ("http", "https") and not rest.startswith("/") and bool(rest) and not set(rest) & set(" \"'")

    def of(self, text: str) -> str:
        """Return what a text means."""
        return text

    def __str__(self) -> str:
        return f"such as http://127.0.0.1:4318{''.join(f', or {word}' for word in self.words)}"


Limit = Whole | Seconds | Address | Url
