"""The nearest known name for a mistyped one."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the choice most like `name` (case ignored), or None when none is near."""
    import difflib

    by_lower = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[matches[0]] if matches else None


def did_you_mean(name: str, choices: Iterable[str]) -> str | None:
    """Return `did you mean "X"?` for the nearest choice, or None when none is near."""
    near = nearest(name, choices)
    return None if near is None else f'did you mean "{near}"?'
