"""The logs of a job that is found again: whole, their last lines, and what is added to them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_RANK_LOG = re.compile(r"rank_(\d+)\.log")
_BLOCK_BYTES = 1 << 20


class LogReader:
    """Yields what was added to the logs of a run folder since the last call.

    When a job was started again inside its folder (`restart_1`, ...), the last start counts.
    """

    def __init__(self, run_folder: str, rank: int | None, num_lines: int | None) -> None:
        """rank: read this one only. num_lines: begin each log that exists now with its last lines; None: all of it."""
        self._run_folder = Path(run_folder)
        self._rank = rank
        self._num_lines = num_lines
        self._offsets: dict[Path, int] = {}
        self._is_first = True

    @property
    def has_found(self) -> bool:
        """True once a log was found, an empty one too."""
        return bool(self._offsets)

    def ranks(self) -> list[int]:
        """Return the ranks that have a log, in order."""
        return [number for number, _ in self._logs()]

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield (rank, bytes) in the order of ranks, everything that is there now."""
        for number, path in self._logs():
            if self._rank is not None and number != self._rank:
                continue
            with path.open("rb") as file:
                if path not in self._offsets:
                    tail_wanted = self._is_first and self._num_lines is not None
                    self._offsets[path] = _start_of_last_lines(path, self._num_lines or 0) if tail_wanted else 0
                elif file.seek(0, 2) < self._offsets[path]:  # it was truncated: what is there now is new
                    self._offsets[path] = 0
                file.seek(self._offsets[path])
                while data := file.read(_BLOCK_BYTES):
                    self._offsets[path] += len(data)
                    yield number, data
        self._is_first = False

    def _logs(self) -> list[tuple[int, Path]]:
        restarts = [
            (int(path.name.removeprefix("restart_")), path)
            for path in self._run_folder.glob("restart_*")
            if path.name.removeprefix("restart_").isdigit()
        ]
        folder = max(restarts)[1] if restarts else self._run_folder
        found = [(_RANK_LOG.fullmatch(path.name), path) for path in folder.glob("rank_*.log")]
        return sorted((int(match[1]), path) for match, path in found if match)


def _start_of_last_lines(path: Path, count: int) -> int:
    """Return where the last `count` lines of a file begin; a line without an end is a line. Reads from the end."""
    with path.open("rb") as file:
        position = size = file.seek(0, 2)
        if count == 0:
            return size
        num_ends = 0
        while position > 0:
            length = min(_BLOCK_BYTES, position)
            position -= length
            file.seek(position)
            block = file.read(length)
            index = len(block)
            while (index := block.rfind(b"\n", 0, index)) >= 0:
                num_ends += position + index < size - 1  # the end of the last line begins no line
                if num_ends == count:
                    return position + index + 1
    return 0
