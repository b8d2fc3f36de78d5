"""Read the journal of a job: all of it, or what was added since the last look. No torch, and no more than json.

Works while the job writes, and after a crash at any byte: a last line that is cut off is left for the next look.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.journal.records import LAUNCHER_FILE, RANK_FILE

Record = dict[str, Any]

_BLOCK_BYTES = 4 << 20


class JournalFile:
    """One file of a journal, read from where the last look ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self.num_damaged = 0  # lines that are no record

    def poll(self, kinds: frozenset[str] | None = None) -> Iterator[Record]:
        """Yield the records that are new. kinds: of these alone; others are skipped before they are read as JSON."""
        marks = None if kinds is None else tuple(f'{{"kind":"{kind}"'.encode() for kind in kinds)
        try:
            file = self.path.open("rb")
        except OSError:
            return
        with file:
            file.seek(self._offset)
            rest = b""
            while data := file.read(_BLOCK_BYTES):
                lines = (rest + data).split(b"\n")
                rest = lines.pop()
                for line in lines:
                    self._offset += len(line) + 1
                    if marks is not None and not line.startswith(marks):
                        continue
                    record = _parsed(line)
                    if record is None:
                        self.num_damaged += 1
                    else:
                        yield record

    @property
    def size_bytes(self) -> int:
        """The size of the file now; 0: it is not there."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def start_near_end(self, num_bytes: int) -> int:
        """Let `poll` begin with the last `num_bytes` of a file that is larger. Return where that is."""
        start = self.size_bytes - num_bytes
        if start > 0:
            self._offset = start + len(self._part(start, num_bytes).partition(b"\n")[0]) + 1
        return self._offset

    def peek(self, start: int, num_bytes: int) -> Iterator[Record]:
        """Yield the records that lie whole within a part of the file. What `poll` yields does not change."""
        lines = self._part(start, num_bytes).split(b"\n")
        for line in lines[1 if start else 0 : -1]:
            record = _parsed(line)
            if record is not None:
                yield record

    def _part(self, start: int, num_bytes: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                return file.read(num_bytes)
        except OSError:
            return b""


def last_record(path: Path, kind: str, tail_bytes: int = 1 << 18) -> Record | None:
    """Return the last record of a kind at the end of a file, however long that is; None where there is none."""
    mark = f'{{"kind":"{kind}"'.encode()
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, 2) - tail_bytes)
            file.seek(start)
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines[1 if start else 0 : -1]):
        if line.startswith(mark) and (record := _parsed(line)) is not None:
            return record
    return None


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None


@dataclass
class TryJournal:
    """The journal of one start of a job."""

    folder: Path
    launcher: JournalFile
    ranks: dict[int, JournalFile] = field(default_factory=dict)

    def find_ranks(self) -> None:
        """Add the files of ranks that are there by now."""
        for path in self.folder.glob("rank_*.jsonl"):
            match = RANK_FILE.fullmatch(path.name)
            if match and int(match[1]) not in self.ranks:
                self.ranks[int(match[1])] = JournalFile(path)
        self.ranks = dict(sorted(self.ranks.items()))


class JobJournal:
    """The journal of a job with all its starts."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder
        self.tries: list[TryJournal] = []
        self.look()

    def look(self) -> None:
        """Find the starts and the ranks that are new."""
        folders = [self.run_folder]
        restarts = [path for path in self.run_folder.glob("restart_*") if _number_of(path) is not None]
        folders += sorted(restarts, key=lambda path: _number_of(path) or 0)
        known = {each.folder for each in self.tries}
        self.tries += [
            TryJournal(folder, JournalFile(folder / LAUNCHER_FILE)) for folder in folders if folder not in known
        ]
        for each in self.tries:
            each.find_ranks()

    @property
    def exists(self) -> bool:
        """Whether there is a journal: not of a job that an older version has run, or that had it switched off."""
        return any(each.launcher.path.exists() or each.ranks for each in self.tries)


def _number_of(path: Path) -> int | None:
    text = path.name.removeprefix("restart_")
    return int(text) if text.isdigit() else None


class LineReader:
    """Makes records of a stream of bytes that may be cut anywhere: what the launcher gets of a rank's journal."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes, take: Callable[[Record], object]) -> None:
        """Give `take` the records that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            record = _parsed(line)
            if record is not None:
                take(record)
