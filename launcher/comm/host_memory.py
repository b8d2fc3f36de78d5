"""Page-locked host memory, and copies between it and a device beside what the device computes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from launcher.base.log import get_logger
from launcher.base.units import format_bytes
from launcher.comm.streams import Side, StreamEvent, Streams

# ---- Host memory that is page-locked, so that a GPU copies from and to it without blocking the host ----
# torch's `pin_memory` rounds each piece up to a power of two, which for a large model is up to twice the host memory
# it should take. Memory that is registered with CUDA where it is takes what was asked for, rounded up to whole pages.


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


# ---- Copies between a device and host memory, beside what the device computes ----


class HostDeviceCopier:
    """Copies in the order they are asked for, on a side stream for each direction: a bus carries both at once.

    With a CPU as device a copy has ended when `copy` returns, and there is nothing to wait for.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        """streams: of the device; None: it has none."""
        self._device = device
        self._streams = Streams() if streams is None else streams
        self._pinned = PinnedMemory() if device.type == "cuda" else None

    def empty(self, numel: int, dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
        """Return host memory, 1-D; pinned memory is what a GPU copies from and to without blocking the host."""
        if self._pinned is None or not is_pinned or not numel:
            return torch.empty(numel, dtype=dtype)
        memory = torch.empty(0, dtype=dtype)
        return memory.set_(self._pinned.empty(numel * dtype.itemsize), 0, (numel,), (1,))

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether the device computes with this memory as it is."""
        return tensor.device.type == self._device.type

    def copy(self, target: Tensor, source: Tensor) -> StreamEvent:
        """Copy `source`, as the current stream's work so far leaves it, into `target` of the same shape.

        Neither may be written, and the memory of neither may be given back, but by work that waits for what is
        returned; the host has to `synchronize` before it reads or writes the one in host memory.
        """
        to_device = self.is_on_device(target)
        if to_device == self.is_on_device(source):
            target.copy_(source)
            return self._streams.record()
        so_far = self._streams.record()
        with self._streams.on(Side.TO_DEVICE if to_device else Side.TO_HOST):
            so_far.wait()
            target.copy_(source, non_blocking=True)
            return self._streams.record()

    def synchronize(self) -> None:
        """Block until everything copied so far is where it was copied to."""
        self._streams.synchronize(Side.TO_DEVICE, Side.TO_HOST)
