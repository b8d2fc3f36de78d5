"""Host memory that a disk can read into and write from without a copy."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

# O_DIRECT wants addresses, offsets and lengths in multiples of the disk's logical blocks: 512 or 4096 bytes.
ALIGNMENT_BYTES = 4096


def padded(num_bytes: int) -> int:
    """Return the next multiple of ALIGNMENT_BYTES."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def aligned_buffer(num_bytes: int) -> memoryview:
    """Return `num_bytes` of zeroed memory at the start of a page; `torch.frombuffer` makes a tensor of it.

    Rather ask for one large buffer and cut it: from 2 MiB on it is made of huge pages where the kernel has some, and a
    request in few pieces is quicker (2 to 3 times: `benchmarks/nvme.py`).

    The memory goes back to the system with the last view or tensor of it. Forked children do not have it: while a
    direct read is under way, fork would leave one of the two processes without the bytes (open(2), "O_DIRECT").
    """
    memory = mmap.mmap(-1, max(padded(num_bytes), ALIGNMENT_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:num_bytes]


def is_aligned(view: memoryview) -> bool:
    """Whether a direct transfer can use this memory. False for read-only memory, whose address Python hides."""
    if view.readonly or len(view) % ALIGNMENT_BYTES:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNMENT_BYTES == 0
