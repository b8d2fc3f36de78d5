"""A rank's progress: written by the rank, read by its agent, through a few bytes of shared memory.

`launcher.heartbeat()` and `launcher.phase()` are for any script; the engine calls them by itself. With `launch
--hang-timeout` a job whose counters stand still is ended, and the rank that hangs is named. On a terminal the panel
shows them.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os

from launcher.base import env
from launcher.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Heartbeats, step, steps in all (int64), loss (float64), phase: all that is known is in the memory, as a rank may
# import this file twice. No reader sees a part of a number. Of a phase that changes just then it may; it looks again.
_LOSS, _PHASE, _MAX_PHASE_BYTES = 3, 32, 40
_NUM_BYTES = _PHASE + _MAX_PHASE_BYTES
_NO_STEP, _NO_LOSS = -1, float("nan")
_shared: mmap.mmap | None = None
_after_step: Callable[[int], None] | None = None  # where faults are rehearsed

STARTING = "starting Python"
TRAINING = "training"
EVALUATING = "evaluating"
BETWEEN_STEPS = "between steps"  # the engine has returned from one: the script reads data, say


class RankProgress(Record):
    """What a rank has reported of its progress."""

    heartbeats: int = 0
    step: int | None = None  # None: it counts no steps of its own
    loss: float | None = None  # the last one it reported; None: none, or not a number
    phase: str = ""  # what it is doing; "": its script has not said so
    total_steps: int | None = None  # the step that is the last one; None: not known

    @property
    def reached_step(self) -> int | None:
        """Its own count of steps, else of its heartbeats; None before the first."""
        return self.step if self.step is not None else self.heartbeats or None


NO_PROGRESS = RankProgress(phase=STARTING)


def heartbeat(loss: float | None = None) -> None:
    """Say that this rank has made progress. Cheap (no system call); does nothing without `launch`.

    loss: shown on the terminal until the next one; a number that is there anyway, not worth a wait for the device.
    Raises: TypeError for a value that is not a number; nothing is counted then.
    """
    update_progress(beats=1, loss=None if loss is None else _number(loss))
    if _after_step is not None and _shared is not None:
        heartbeats, step = memoryview(_shared).cast("q")[:2]
        if step == _NO_STEP:  # nothing else counts steps
            _after_step(heartbeats)


def _number(loss: object) -> float:
    try:
        if not isinstance(loss, (str, bytes)):  # a text that reads like a number is a mistake, too
            return float(loss)  # type: ignore[arg-type]  # whatever says that it is a number, a tensor of one element
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"heartbeat(loss) takes a number, such as loss.item(); got {type(loss).__name__} {loss!r:.60}")


@contextlib.contextmanager
def phase(text: str) -> Iterator[None]:
    """Show on the terminal what this rank does in the block, such as "writing a sample"; after it, what it did before.

    Cheap (no system call), and no progress: a rank that hangs in the block is shown with the phase. May be a
    decorator, too. text: of up to 40 bytes; a longer one is cut. Does nothing without `launch`.
    Raises: TypeError for a phase that is not a string.
    """
    if not isinstance(text, str):
        raise TypeError(f'phase(text) takes a string, such as "evaluating"; got {type(text).__name__} {text!r:.60}')
    before = _phase()
    update_progress(phase=" ".join(text.split()))
    try:
        yield
    finally:
        update_progress(phase=before)


def _phase() -> str:
    shared = _memory()
    return "" if shared is None else _text(shared[_PHASE:])


def _text(stored: bytes) -> str:
    return stored.rstrip(b"\0").decode("utf-8", "ignore")  # a character may have been cut


def update_progress(
    *,
    beats: int = 0,
    step: int | None = None,
    total_steps: int | None = None,
    loss: float | None = None,
    phase: str | None = None,
) -> None:
    """Report where this rank is. Only `beats` count as progress. step: where it is not the number of heartbeats."""
    shared = _memory()
    if shared is not None:
        _write(shared, beats, step, total_steps, loss, phase)
        if step is not None and _after_step is not None:
            _after_step(step)


def _write(
    memory: mmap.mmap | bytearray,
    beats: int,
    step: int | None,
    total_steps: int | None,
    loss: float | None,
    phase: str | None,
) -> None:
    numbers = memoryview(memory).cast("q")
    numbers[0] += beats
    if step is not None:
        numbers[1] = step
    if total_steps is not None:
        numbers[2] = total_steps
    if loss is not None:
        memoryview(memory).cast("d")[_LOSS] = loss
    if phase is not None:
        memory[_PHASE:] = phase.encode("utf-8", "replace")[:_MAX_PHASE_BYTES].ljust(_MAX_PHASE_BYTES, b"\0")


def _memory() -> mmap.mmap | None:
    global _shared, _after_step
    path = os.environ.get(env.PROGRESS_FILE.name) if _shared is None else None
    if path is not None:
        # Without it the agent has gone, and this rank is about to go too.
        with contextlib.suppress(OSError), open(path, "r+b") as file:
            _shared = mmap.mmap(file.fileno(), _NUM_BYTES)
        if env.FAULTS.name in os.environ:
            _after_step = importlib.import_module("launcher.journal.faults").Faults().after_step
    return _shared


def make_counter(path: str) -> int:
    """Create the record of a rank and return a descriptor to read it with."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    record = bytearray(_NUM_BYTES)
    _write(record, 0, _NO_STEP, _NO_STEP, _NO_LOSS, STARTING)
    os.write(descriptor, record)
    return descriptor


def read_counter(descriptor: int) -> RankProgress:
    """Return what a rank has reported so far."""
    data = os.pread(descriptor, _NUM_BYTES, 0)
    if len(data) != _NUM_BYTES:  # a script may have emptied the file
        return RankProgress()
    heartbeats, step, total_steps = memoryview(data).cast("q")[:_LOSS]
    loss = memoryview(data).cast("d")[_LOSS]
    return RankProgress(
        heartbeats,
        None if step == _NO_STEP else step,
        None if loss != loss else loss,  # NaN
        _text(data[_PHASE:]),
        None if total_steps == _NO_STEP else total_steps,
    )
