"""What of the ranks' output a reader still has before him, so that a failing rank's last lines are not shown twice."""

from __future__ import annotations

_SCREEN_LINES = 30  # what came before so many lines may have scrolled away
_TAIL_BYTES = 1 << 14  # kept of each rank: more than the last lines of a failure


class ShownOutput:
    """The end of each rank's output, and how much of all ranks' was shown after it."""

    def __init__(self) -> None:
        self._num_lines = 0
        self._tails: dict[int, tuple[bytes, int]] = {}  # and the number of lines when it was shown

    def add(self, rank: int, data: bytes) -> None:
        """Note that a rank's bytes were shown."""
        self._num_lines += data.count(b"\n")
        tail, _ = self._tails.get(rank, (b"", 0))
        self._tails[rank] = ((tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:], self._num_lines)

    def has(self, rank: int | None, text: str) -> bool:
        """Whether this rank wrote `text`, and so short a while ago that it is still on the screen."""
        if rank not in self._tails or not text.strip():
            return False
        tail, num_lines = self._tails[rank]
        is_near = self._num_lines - num_lines + text.count("\n") <= _SCREEN_LINES
        return is_near and text.strip().encode("utf-8", "replace") in tail
