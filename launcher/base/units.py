"""Bytes, counts, durations and foreign text as people read them."""

from __future__ import annotations

import math
import re

_BINARY_STEPS = ("B", "KiB", "MiB", "GiB", "TiB")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and line ends
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b)?", re.IGNORECASE)


def printable(text: str) -> str:
    """Return `text` with control characters spelled out: what files, hosts and ranks say must not drive the terminal.

    For lines of our own; output of ranks is shown as it is.
    """
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def parse_bytes(text: str) -> int | None:
    """Return the bytes that `80GB` (decimal), `80GiB` (binary), `512M` or a plain number of bytes means, else None."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    step = 1024 if match[3] else 1000
    power = " kmgt".index(match[2].lower()) if match[2] else 0
    size = float(match[1]) * float(step**power)
    return round(size) if math.isfinite(size) else None


def format_bytes(num_bytes: float) -> str:
    """Return `1.5 GiB`-style text, binary steps."""
    value = float(num_bytes)
    for unit in _BINARY_STEPS:
        if abs(value) < 1024 or unit == _BINARY_STEPS[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable: the last unit always returns")


def format_count(count: float) -> str:
    """Return `41.2k`-style text, decimal steps."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.1f}{suffix}"
    return f"{count:.0f}" if float(count).is_integer() else f"{count:.1f}"


def counted(count: int, noun: str) -> str:
    """Return `1 host` or `3 hosts`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_duration(seconds: float) -> str:
    """Return `12.4 s`, `3 min 05 s` or `2 h 07 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
