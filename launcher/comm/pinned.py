"""Host memory that is page-locked, so that a GPU copies from and to it without blocking the host.

torch's `pin_memory` rounds each piece up to a power of two, which for a large model is up to twice the host memory it
should take. Memory that is registered with CUDA where it is takes what was asked for, rounded up to whole pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable

import torch

from launcher.base.log import get_logger
from launcher.base.units import format_bytes


class PinnedMemory:
    """Registers memory with CUDA, each piece once; it is registered until it is freed."""

    def __init__(self) -> None:
        self._has_failed = False

    def empty(self, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage of page-locked memory that no page shares with others. See `storage_of`."""
        memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)  # a forked child would leave one of the two without what a copy brings
        return self.storage_of(memoryview(memory)[:num_bytes])

    def storage_of(self, view: memoryview) -> torch.UntypedStorage:
        """Return a storage of registered memory; where CUDA refuses that, which is said once, of the same, pageable.

        view: writable; the storage keeps it.
        """
        memory = (ctypes.c_ubyte * len(view)).from_buffer(view)
        if not self._has_failed:
            unregister = self._register(ctypes.addressof(memory), len(view))
            if unregister is not None:
                # This is done before `memory`, which the storage holds, gives the view back: no one else has it yet.
                weakref.finalize(memory, unregister).atexit = False  # the process takes its memory with it
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def _register(self, address: int, num_bytes: int) -> Callable[[], object] | None:
        runtime = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if error == 0:
            return lambda: runtime.cudaHostUnregister(address)
        self._has_failed = True
        _take_last_error()
        get_logger().warning(
            "cudaHostRegister refused to page-lock %s of host memory (error %d): copies between it and the GPU block"
            " the host. `ulimit -l` bounds the memory that may be page-locked",
            format_bytes(num_bytes),
            error,
        )
        return None


def _take_last_error() -> None:
    """Launch a kernel for CUDA's last error, which a call that was refused leaves behind.

    The runtime keeps it for the next call that asks: torch does after each of its kernels, and would raise it as that
    of a kernel which ran well. `torch.cuda.cudart()` has no `cudaGetLastError`.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")
