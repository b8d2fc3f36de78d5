"""A rank's progress: written by the rank, read by its agent, through a few bytes of shared memory.

`launcher.heartbeat()` is for any script; the engine calls it at every step. With `launch --hang-timeout` a job whose
counters stand still is ended, and the rank that hangs is named. On a terminal the panel shows them.
"""

from __future__ import annotations

import math
import mmap
import os
import struct

from launcher.base import env
from launcher.base.record import Record

# Heartbeats, step, loss. Native order: each field is then stored by one copy of eight bytes, which no reader sees half.
_RECORD = struct.Struct("@Qqd")
_NO_STEP = -1
_shared: mmap.mmap | None = None


class Told(Record):
    """What a rank has told about its progress."""

    heartbeats: int = 0
    step: int | None = None  # None: it counts no steps of its own
    loss: float | None = None  # the last one it told; None: none, or not a number


NOTHING = Told()


_count, _step, _loss = 0, _NO_STEP, math.nan


def heartbeat(loss: float | None = None) -> None:
    """Say that this rank has made progress. Cheap (no system call); does nothing without `launch`.

    loss: shown on the terminal until the next one; a number that is there anyway, not worth a wait for the device.
    Raises: TypeError for a value that is not a number; nothing is counted then.
    """
    global _count
    number = None if loss is None else _number(loss)
    _count += 1
    tell(loss=number)


def _number(loss: object) -> float:
    try:
        if not isinstance(loss, (str, bytes)):  # a text that reads like a number is a mistake, too
            return float(loss)  # type: ignore[arg-type]  # whatever says that it is a number, a tensor of one element
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"heartbeat(loss) takes a number, such as loss.item(); got {type(loss).__name__} {loss!r:.60}")


def tell(*, step: int | None = None, loss: float | None = None) -> None:
    """Say where this rank stands, without counting it as progress. step: where it is not the number of heartbeats."""
    global _shared, _step, _loss
    if _shared is None:
        path = os.environ.get(env.PROGRESS_FILE.name)
        if path is None:
            return
        try:
            with open(path, "r+b") as file:
                _shared = mmap.mmap(file.fileno(), _RECORD.size)
        except OSError:  # the agent has gone, and this rank is about to go too
            return
    _step = _step if step is None else step
    _loss = _loss if loss is None else loss
    _RECORD.pack_into(_shared, 0, _count, _step, _loss)


def make_counter(path: str) -> int:
    """Create the record of a rank and return a descriptor to read it with."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.write(descriptor, _RECORD.pack(0, _NO_STEP, math.nan))
    return descriptor


def read_counter(descriptor: int) -> Told:
    """Return what a rank has told so far."""
    data = os.pread(descriptor, _RECORD.size, 0)
    if len(data) != _RECORD.size:  # a script may have emptied the file
        return Told(0, None, None)
    count, step, loss = _RECORD.unpack(data)
    return Told(count, None if step == _NO_STEP else step, None if math.isnan(loss) else loss)
