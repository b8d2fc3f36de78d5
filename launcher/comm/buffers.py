"""Memory for flat buffers, used again and again.

A large buffer that is freed and allocated at every step costs page faults on a CPU. The pool keeps what was given
back; a step needs the same sizes as the one before.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

# Moves memory from one storage to another, so that tensors (and what autograd saved of them) keep their storage while
# its memory comes and goes. torch has it since 2.12; before, and on GPUs, the allocator's own cache is used.
_CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")

_LARGE_NUMEL = 2**18  # a freed tensor of this size is worth giving back to the system


def _swap(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    one._swap_data_ptr_(other)  # type: ignore[attr-defined]  # private: see `_CAN_SWAP`


class BufferPool:
    """Lends memory to storages of one device. One pool serves one engine; not thread-safe."""

    def __init__(self, device: torch.device, allocate: Callable[[int], torch.UntypedStorage] | None = None) -> None:
        """allocate: makes memory of so many bytes, of a kind the caller needs; None: torch's own.

        With it the pool never holds more than the most that was lent at the same time.
        """
        self.device = device
        self._allocate = allocate
        self._pools = device.type == "cpu" and _CAN_SWAP
        self._free: defaultdict[int, list[torch.UntypedStorage]] = defaultdict(list)  # bytes -> memory to lend
        self._free_bytes = 0
        self.lent_bytes = 0
        self.peak_bytes = 0  # largest `lent_bytes` so far

    def lend(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Give an empty storage `num_bytes` of memory with undefined content."""
        self.lent_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.lent_bytes)
        if self._pools and self._free[num_bytes]:
            _swap(storage, self._free[num_bytes].pop())
            self._free_bytes -= num_bytes
        elif self._pools and self._allocate is not None:
            self._trim()
            _swap(storage, self._allocate(num_bytes))
        else:
            storage.resize_(num_bytes)

    def take_back(self, storage: torch.UntypedStorage) -> None:
        """Empty a storage that got its memory from `lend`. Nothing may read it until it is lent memory again."""
        num_bytes = storage.nbytes()
        self.lent_bytes -= num_bytes
        if not self._pools:
            storage.resize_(0)
            return
        kept = torch.UntypedStorage(0, device=self.device)
        _swap(kept, storage)
        self._free[num_bytes].append(kept)
        self._free_bytes += num_bytes

    def _trim(self) -> None:
        """Let memory of other sizes go until there is room for what is being lent."""
        while self._free_bytes and self.lent_bytes + self._free_bytes > self.peak_bytes:
            num_bytes = next(size for size, kept in self._free.items() if kept)
            self._free[num_bytes].pop()
            self._free_bytes -= num_bytes

    def borrow(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor with undefined content; give it back with `give_back`."""
        tensor = torch.empty(0, dtype=dtype, device=self.device)
        storage = tensor.untyped_storage()
        self.lend(storage, numel * dtype.itemsize)
        with torch.no_grad():
            tensor.set_(storage, 0, (numel,), (1,))
        return tensor

    def give_back(self, tensor: Tensor) -> None:
        """Take the memory of a tensor from `borrow` back."""
        self.take_back(tensor.untyped_storage())

    def note_freed(self, numel: int) -> None:
        """Give freed memory inside this process's heap back to the system, when a large tensor has gone.

        glibc cannot reuse the place of a freed buffer for one of the same size when alignment makes it a little larger:
        a model built or sharded layer by layer would leave a hole for each layer.
        """
        if self.device.type == "cpu" and numel >= _LARGE_NUMEL:
            with contextlib.suppress(OSError, AttributeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)
