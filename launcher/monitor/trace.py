"""A rank's side of `launch trace`: torch's profiler over whole steps, started and stopped between two of them.

Where nothing is asked for, the end of a step costs two attributes, and the journal's thread looks for a file a few
times a second. Saving, compressing and sending are the work of a thread of their own.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import torch

from launcher.base import env
from launcher.comm.torch_internals import TraceProfile, is_profiler_open
from launcher.journal.rank import RankJournal
from launcher.journal.records import PHASES
from launcher.journal.steps import StepClock
from launcher.journal.trace_request import AnswerHead, TraceRequest, parsed_request, pipe_of

_MAX_REQUEST_BYTES = 1 << 16
_GZIP_LEVEL = 5  # 9 takes twice as long, for 3 %
_TRACED_DEVICES = ("cuda", "xpu")
_TAKEN = "another profiler of the script is open; a process can have one at a time"

_tracer: StepTracer | None = None


class StepTracer:
    """Traces steps of this process when it is asked to."""

    def __init__(self, journal: RankJournal, clock: StepClock, path: str) -> None:
        """path: where requests are found."""
        self._journal, self._clock, self._path = journal, clock, path
        self._request: TraceRequest | None = None  # that is there, as the journal's thread has seen
        self._begun_id = ""
        self._recording: _Recording | None = None
        journal.call_often(self._look)

    def _look(self) -> None:
        try:
            with open(self._path, "rb") as file:
                self._request = parsed_request(file.read(_MAX_REQUEST_BYTES))
        except OSError:
            self._request = None

    def end_step(self, step: int) -> None:
        """Note that a step has ended: a trace may begin or end here. For the thread that takes the steps.

        No transfer of gloo may be in flight while a profiler is open: torch's corrupts its memory where it stops then.
        """
        if self._request is not None or self._recording is not None:
            self._advance(step)

    def _advance(self, step: int) -> None:
        request, recording = self._request, self._recording
        if recording is None:
            if request is not None and request.id != self._begun_id and step + 1 >= request.first_step:
                self._begin(request, step)
            return
        recording.end_step(step)
        is_wanted = request is not None and request.id == recording.request.id
        if recording.is_complete or not is_wanted:
            self._recording = None
            facts = recording.stop()
            if is_wanted:
                self._answer(recording, facts)

    def _begin(self, request: TraceRequest, step: int) -> None:
        self._begun_id = request.id
        if is_profiler_open():
            self._answer_error(request, _TAKEN)
            return
        try:
            self._recording = _Recording(request, self._clock, step)
        except Exception as error:  # noqa: BLE001  # the job is to continue, whatever keeps a profiler from starting
            self._answer_error(request, f"torch's profiler did not start: {error!r:.500}")

    def _answer(self, recording: _Recording, facts: dict[str, Any] | None) -> None:
        if facts is None:
            self._answer_error(recording.request, _TAKEN)
            return
        steps = recording.steps
        self._journal.add("trace", step=steps[-1][0], num_steps=len(steps) - 1)
        threading.Thread(target=_send, args=(self._path, recording, facts), name="trace").start()

    def _answer_error(self, request: TraceRequest, error: str) -> None:
        with contextlib.suppress(OSError), _open_pipe(self._path) as pipe:
            pipe.write(AnswerHead(request.id, error).encoded())


class _Recording:
    """One trace while it is recorded. Times are the host's clock, nanoseconds since the epoch: the profiler's, too."""

    def __init__(self, request: TraceRequest, clock: StepClock, step: int) -> None:
        self.request, self._clock = request, clock
        self.steps: list[tuple[int, int]] = []  # number and end; first that of the step before the trace
        self._profile = TraceProfile(_device())
        if not self._profile.needs_warm_up:
            self._start(step)

    def _start(self, step: int) -> None:
        self._profile.start()
        self.steps.append((step, time.time_ns()))
        self._clock.marks = []
        self._clock.mark()

    @property
    def is_complete(self) -> bool:
        """Whether all steps have been recorded."""
        return len(self.steps) > self.request.num_steps

    def end_step(self, step: int) -> None:
        """Note the end of a step."""
        if self.steps:
            self.steps.append((step, time.time_ns()))
        else:  # the profiler of a GPU has warmed up
            self._start(step)

    def stop(self) -> dict[str, Any] | None:
        """End the recording; return what is known beside the profile. None: the profile is lost."""
        marks, self._clock.marks = self._clock.marks or [], None
        if not self._profile.stop():
            return None
        return {
            "time_ns": time.time_ns(),
            "monotonic_ns": time.monotonic_ns(),
            "pid": os.getpid(),
            "steps": self.steps,
            "phases": [(time_ns, PHASES[phase]) for time_ns, phase in marks],
        }

    def save(self, path: str) -> None:
        """Write the profile as a Chrome trace."""
        self._profile.save(path)


def _device() -> str | None:
    """Return the kind of device that the script uses, where it can be traced."""
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return current.type if current is not None and current.type in _TRACED_DEVICES else None


def _send(request_path: str, recording: _Recording, facts: dict[str, Any]) -> None:
    """Save, compress and send a trace: a line of facts, and the profile."""
    saved, packed = f"{request_path}.json", f"{request_path}.gz"
    request = recording.request
    try:
        recording.save(saved)
        with open(saved, "rb") as source, gzip.open(packed, "wb", _GZIP_LEVEL) as target:
            target.write(json.dumps(facts).encode() + b"\n")
            shutil.copyfileobj(source, target, 1 << 20)
        head, source_path = AnswerHead(request.id, num_bytes=os.path.getsize(packed)), packed
    except OSError as error:
        head, source_path = AnswerHead(request.id, f"it cannot be written on its host: {error.strerror}"), os.devnull
    try:
        with open(source_path, "rb") as source, _open_pipe(request_path) as pipe:
            pipe.write(head.encoded())
            shutil.copyfileobj(source, pipe, 1 << 16)
    except OSError:  # nobody wants it any more
        pass
    finally:
        for path in (saved, packed):
            Path(path).unlink(missing_ok=True)


def _open_pipe(request_path: str) -> Any:
    """Open the pipe of an answer. Raises: OSError where nobody reads it any more."""
    descriptor = os.open(pipe_of(request_path), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(descriptor, True)
    return open(descriptor, "wb")


def make_tracer(journal: RankJournal, clock: StepClock) -> StepTracer | None:
    """Make the tracer of this process; None where no agent could ask for a trace."""
    global _tracer
    path = os.environ.get(env.TRACE_FILE.name)
    _tracer = None if path is None else StepTracer(journal, clock, path)
    return _tracer


def own_tracer() -> StepTracer | None:
    """Return the tracer of this process, if it has one."""
    return _tracer
