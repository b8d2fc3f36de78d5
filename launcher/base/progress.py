"""A rank's progress counter: written by the rank, read by its agent, through eight bytes of shared memory.

`launcher.heartbeat()` is for any script; the engine calls it at every step. With `launch --hang-timeout` a job whose
counters stand still is ended, and the rank that hangs is named.
"""

from __future__ import annotations

import mmap
import os
import struct

from launcher.base import env

_COUNTER = struct.Struct("=Q")
_shared: mmap.mmap | None = None
_count = 0


def heartbeat() -> None:
    """Say that this rank has made progress. Cheap (no system call); does nothing without `launch`."""
    global _shared, _count
    if _shared is None:
        path = os.environ.get(env.PROGRESS_FILE.name)
        if path is None:
            return
        try:
            with open(path, "r+b") as file:
                _shared = mmap.mmap(file.fileno(), _COUNTER.size)
        except OSError:  # the agent has gone, and this rank is about to go too
            return
    _count += 1
    _COUNTER.pack_into(_shared, 0, _count)


def make_counter(path: str) -> int:
    """Create a counter for a rank and return a descriptor to read it with."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    os.write(descriptor, _COUNTER.pack(0))
    return descriptor


def read_counter(descriptor: int) -> int:
    """Return how many heartbeats a rank has made."""
    data = os.pread(descriptor, _COUNTER.size, 0)
    count: int = _COUNTER.unpack(data)[0] if len(data) == _COUNTER.size else 0  # a script may have emptied the file
    return count
