"""Traces that a user asks for while the job runs, on the launcher's side: the request in the run folder, the answers.

Files are read and written on the thread of the run folder: a disk that stalls delays a trace, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from launcher.agent.wire import Trace
from launcher.base.private_files import create_private, write_private
from launcher.job.logs import RunFolder
from launcher.journal.trace_request import (
    MAX_HEAD_BYTES,
    REQUEST_FILE,
    AnswerHead,
    answer_file,
    parsed_head,
    parsed_request,
)
from launcher.plan.plan import JobPlan

_LOOK_INTERVAL_S = 0.5
_MAX_REQUEST_BYTES = 1 << 20
_NOTHING = Trace("", [], 0, 0)


class TraceDesk:
    """Looks for requests, and keeps what ranks answer. `look` is for the controller's thread, `write_rank` for any."""

    def __init__(self, plan: JobPlan, files: RunFolder, wake: Callable[[], object]) -> None:
        """wake: has the controller look soon. Any thread calls it."""
        self._folder, self._files, self._wake = plan.run_folder, files, wake
        self._look_at_s = 0.0
        self._is_looking = False
        self._wanted = self._sent = _NOTHING
        self._answers: dict[int, _Answer] = {}  # by rank

    def look(self, now_s: float) -> Trace | None:
        """Return the order that agents are to be sent now: a new request, or that the last one was taken back."""
        if now_s >= self._look_at_s and not self._is_looking:
            self._look_at_s, self._is_looking = now_s + _LOOK_INTERVAL_S, True
            self._files.put(self._read_request)
        wanted = self._wanted
        if wanted.id == self._sent.id:
            return None
        self._sent = wanted
        return wanted

    def write_rank(self, rank: int, data: bytes, then: Callable[[], object]) -> None:
        """Take a piece of a rank's answer, later, and call `then`."""

        def write() -> None:
            if not data:
                self._drop(rank)
                self._answers[rank] = _Answer(self._folder / answer_file(rank))
            elif rank in self._answers and self._answers[rank].add(data):
                self._drop(rank)
            then()

        self._files.put(write)

    # ---- on the thread of the run folder ----

    def _read_request(self) -> None:
        try:
            with (self._folder / REQUEST_FILE).open("rb") as file:
                request = parsed_request(file.read(_MAX_REQUEST_BYTES))
        except OSError:
            request = None
        if request is None:
            self._wanted = _NOTHING
            for rank in list(self._answers):
                self._drop(rank)
        elif request.id != self._wanted.id:
            self._wanted = Trace(request.id, request.ranks, request.num_steps, request.first_step)
        self._is_looking = False
        if self._wanted.id != self._sent.id:
            self._wake()

    def _drop(self, rank: int) -> None:
        answer = self._answers.pop(rank, None)
        if answer is not None:
            answer.close()


class _Answer:
    """One rank's answer while it comes."""

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_suffix(".part")
        self._head_line = b""
        self._head: AnswerHead | None = None
        self._num_left = 0
        self._file: BinaryIO | None = None

    def add(self, data: bytes) -> bool:
        """Write a piece; return whether it was the last one. The file has its name once it is complete."""
        try:
            if self._head is None:
                line, end, data = (self._head_line + data).partition(b"\n")
                self._head_line = line
                if not end:
                    return len(line) > MAX_HEAD_BYTES
                self._head = parsed_head(line)
                if self._head is None:
                    return True
                self._num_left = self._head.num_bytes
                self._part.unlink(missing_ok=True)
                self._file = os.fdopen(create_private(self._part), "wb")
                self._file.write(line + end)
            if self._file is None:
                return True
            self._num_left -= len(data)
            self._file.write(data)
            if self._num_left > 0:
                return False
            self._file.close()
            os.replace(self._part, self._path)
        except OSError as error:
            self._say(f"the launcher cannot write it: {error.strerror}")
        return True

    def close(self) -> None:
        """Let go of the file; what is not complete is removed."""
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
            self._part.unlink(missing_ok=True)

    def _say(self, error: str) -> None:
        if self._head is not None:
            with contextlib.suppress(OSError):  # a full disk often has room for a few bytes
                self.close()
                write_private(self._path, AnswerHead(self._head.id, error).encoded())
