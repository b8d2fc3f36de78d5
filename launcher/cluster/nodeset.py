"""Expand host ranges: `node[01-03,7]-ib` names node01-ib, node02-ib, node03-ib and node7-ib.

Zero padding is kept, several brackets multiply. Brackets that hold an IPv6 address are not ranges
and never reach this file: see `hostname.py`.
"""

from __future__ import annotations

import itertools

from launcher.base.errors import HostfileError
from launcher.cluster.cluster import MAX_EXPANSION

_MAX_DIGITS = 9


def expand(text: str) -> tuple[str, ...]:
    """Return the names `text` stands for, in the order written; a plain name is returned alone.

    Raises: HostfileError when brackets or ranges are malformed, or there are more than MAX_EXPANSION names.
    """
    pieces = _split(text)
    total = 1
    for piece in pieces:
        total *= len(piece)
        if total > MAX_EXPANSION:
            raise HostfileError(_too_many(text), hint="split it, or check the range for a typo")
    return tuple("".join(combination) for combination in itertools.product(*pieces))


def _split(text: str) -> list[tuple[str, ...]]:
    """Cut `a[1-2]b` into (("a",), ("1", "2"), ("b",))."""
    pieces: list[tuple[str, ...]] = []
    rest = text
    while rest:
        literal, bracket, tail = rest.partition("[")
        if "]" in literal:
            raise HostfileError(f'"]" without "[" in "{text}"', hint='ranges are written "node[01-16]"')
        if literal:
            pieces.append((literal,))
        if not bracket:
            break
        body, closing, rest = tail.partition("]")
        if not closing:
            raise HostfileError(f'"[" without "]" in "{text}"', hint='ranges are written "node[01-16]"')
        pieces.append(expand_numbers(body, text))
    return pieces


def expand_numbers(body: str, whole: str) -> tuple[str, ...]:
    """Return the zero-padded numbers of `01-03,7`; `whole` is only named in errors.

    Raises: HostfileError for anything that is not a comma list of numbers and ascending ranges.
    """
    numbers: list[str] = []
    for part in body.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (_is_number(first) and _is_number(last)):
            raise HostfileError(
                f'"{part}" is not a number or a range of numbers in "{whole}"',
                hint='expected for example "0-3" or "01,02,07"',
            )
        low, high = int(first), int(last)
        if high < low:
            raise HostfileError(f'range "{part}" in "{whole}" runs backwards', hint=f'write "{last}-{first}"')
        if len(last) != len(first) and ((first.startswith("0") and first != "0") or last.startswith("0")):
            raise HostfileError(
                f'range "{part}" in "{whole}" mixes paddings', hint="give both ends the same number of digits"
            )
        if len(numbers) + high - low + 1 > MAX_EXPANSION:
            raise HostfileError(_too_many(whole), hint="split it, or check the range for a typo")
        numbers.extend(str(number).zfill(len(first)) for number in range(low, high + 1))
    return tuple(numbers)


def _is_number(text: str) -> bool:
    return 0 < len(text) <= _MAX_DIGITS and text.isascii() and text.isdigit()


def _too_many(text: str) -> str:
    return f'"{text}" names more than {MAX_EXPANSION} entries'
