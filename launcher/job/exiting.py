"""Ranks that have failed but do not end: exit handlers, threads that are not daemons, children they wait for."""

from __future__ import annotations

TELL_AFTER_S = 2.0  # most ranks end within this, with an interpreter full of transformers too


class RaisedWatch:
    """Knows since when ranks are on their way out. Times are the monotonic clock."""

    def __init__(self, grace_s: float) -> None:
        """grace_s: what a rank gets to end by itself."""
        self._limit_s = max(grace_s, TELL_AFTER_S)
        self._since_s: dict[int, float] = {}
        self._was_told = False

    def raised(self, rank: int, now_s: float) -> None:
        """Note that a rank has left its error record and runs on."""
        self._since_s.setdefault(rank, now_s)

    def ended(self, rank: int) -> None:
        """Forget a rank that has ended."""
        self._since_s.pop(rank, None)

    def is_to_be_told(self, now_s: float) -> bool:
        """Whether the user should hear of it now; True once."""
        is_due = not self._was_told and self._is_older(TELL_AFTER_S, now_s)
        self._was_told = self._was_told or is_due
        return is_due

    def is_over(self, now_s: float) -> bool:
        """Whether a rank has had its time."""
        return self._is_older(self._limit_s, now_s)

    def _is_older(self, age_s: float, now_s: float) -> bool:
        return any(now_s - since_s >= age_s for since_s in self._since_s.values())
