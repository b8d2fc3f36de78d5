"""Bytes, counts, durations and foreign text as people read them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

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


# ---- Secrets in what people read: plans, lists of jobs, reports ----


MASK = "•••"
# Whole words: `--tokenizer` and `--max_tokens` hold no secrets.
_SECRET_NAMES = re.compile(
    r"(token|secret|passw(or)?d|(api|access|secret|private|wandb)[-_]?key|credentials?|auth)(?![a-z])", re.IGNORECASE
)
# What services give out: Hugging Face, GitHub, OpenAI-like, AWS, Slack, W&B (40 hex digits), JSON web tokens.
_SECRET_VALUES = re.compile(
    r"hf_[A-Za-z0-9]{8,}|gh[pousr]_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{12,}|xox[abprs]-[A-Za-z0-9-]{8,}"
    r"|\b[0-9a-f]{40}\b|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
# The same in JSON and YAML: `"wandb_key": "..."`, `api_key: ...`.
_SECRET_LINES = re.compile(
    rf"""(["']?[\w.-]*{_SECRET_NAMES.pattern}[\w.-]*["']?\s*:\s*)("[^"\n]*"|[^\s,}}"]+)""", re.IGNORECASE
)


def mask_text(text: str) -> str:
    """Return a config's text with secrets hidden, by the names of keys and by the form of values."""
    return _SECRET_VALUES.sub(MASK, _SECRET_LINES.sub(lambda found: f'{found[1]}"{MASK}"', text))


def mask_arguments(arguments: Iterable[str]) -> list[str]:
    """Return a command line's words with secrets hidden: `--token X`, `--api_key=X`, and values known by their form."""
    shown: list[str] = []
    follows_name = False
    for word in arguments:
        name, equals, value = word.partition("=")
        is_option = name.startswith("-") or (equals and name.isidentifier())
        if follows_name and not word.startswith("-"):
            shown.append(MASK)
        elif is_option and equals and value and _SECRET_NAMES.search(name):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(_SECRET_VALUES.sub(MASK, word))
        follows_name = name.startswith("-") and not equals and bool(_SECRET_NAMES.search(name))
    return shown
