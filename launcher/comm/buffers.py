"""Memory for flat buffers, used again and again.

A large buffer that is freed and allocated at every step costs page faults on a CPU. The pool keeps what was given
back; a step needs the same sizes as the one before.

[Note: memory and streams] On a GPU the allocator gives memory that was freed to the next work of the stream on which it
was allocated, its owner, and orders nothing else: another stream that still uses the memory would see
the new content.
(Collectives keep their tensors until `wait()` only: see https://github.com/pytorch/pytorch/issues/188655, where memory
of one stream is freed after a wait on another.) `record_stream` makes the allocator wait, but for an unknown time, in
which it takes more memory: the peak would depend on how far the host runs ahead. So here events do it, and the peak is
known:

* What comes back from its owner goes to the allocator at once.
* What comes back from another stream, whose work so far has been ordered after every other use, either has the owner
  wait at once (`take_back`), where the owner has nothing to do but to use such memory; or it is held, and the owner
  waits when it is lent memory again (`give_back`): computing is not kept back before it needs the buffer.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from launcher.comm.streams import Side, StreamEvent, Streams

# Moves memory from one storage to another, so that tensors (and what autograd saved of them) keep their storage while
# its memory comes and goes. torch has it since 2.12; before, and on GPUs, the allocator's own cache is used.
_CAN_SWAP = hasattr(torch.UntypedStorage, "_swap_data_ptr_")

_LARGE_NUMEL = 2**18  # a freed tensor of this size is worth giving back to the system


def _swap(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    one._swap_data_ptr_(other)  # type: ignore[attr-defined]  # private: see `_CAN_SWAP`


class BufferPool:
    """Lends memory to storages of one device. One pool serves one engine; not thread-safe."""

    def __init__(
        self,
        device: torch.device,
        allocate: Callable[[int], torch.UntypedStorage] | None = None,
        streams: Streams | None = None,
    ) -> None:
        """allocate: makes memory of so many bytes, of a kind the caller needs; None: torch's own.

        With it the pool never holds more than the most that was lent at the same time. streams: of the device; None: it
        has none.
        """
        self.device = device
        self._streams = Streams() if streams is None else streams
        self._owners: dict[int, Side | None] = {}  # storage -> the stream it was lent memory on
        self._held: defaultdict[Side | None, list[tuple[torch.UntypedStorage, StreamEvent]]] = defaultdict(list)
        self._allocate = allocate
        self.is_pooled = device.type == "cpu" and _CAN_SWAP  # else `allocate` is not used
        self._free: defaultdict[int, list[torch.UntypedStorage]] = defaultdict(list)  # bytes -> memory to lend
        self._free_bytes = 0
        self.lent_bytes = 0
        self.peak_bytes = 0  # largest `lent_bytes` so far

    def lend(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Give an empty storage `num_bytes` of memory with undefined content, for work of the current stream."""
        if self._streams.is_async:
            self.reclaim()
            self._owners[storage._cdata] = self._streams.current()
        self.lent_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.lent_bytes)
        if self.is_pooled and self._free[num_bytes]:
            _swap(storage, self._free[num_bytes].pop())
            self._free_bytes -= num_bytes
        elif self.is_pooled and self._allocate is not None:
            self._trim()
            _swap(storage, self._allocate(num_bytes))
        else:
            storage.resize_(num_bytes)

    def take_back(self, storage: torch.UntypedStorage) -> None:
        """Empty a storage that got its memory from `lend`. Nothing may read it until it is lent memory again.

        On a GPU the memory's owner waits for the current stream's work so far.
        """
        if self._streams.is_async:
            owner = self._owners.pop(storage._cdata)
            if owner is not None and owner is not self._streams.current():
                so_far = self._streams.record()
                with self._streams.on(owner):
                    so_far.wait()
        self._empty(storage)

    def _empty(self, storage: torch.UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        self.lent_bytes -= num_bytes
        if not self.is_pooled:
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
        """Take the memory of a tensor from `borrow` back.

        On a GPU the memory's owner waits for the current stream's work so far when it is lent memory again.
        """
        storage = tensor.untyped_storage()
        if self._streams.is_async:
            owner = self._owners.pop(storage._cdata)
            if owner is not self._streams.current():
                self._held[owner].append((storage, self._streams.record()))
                return
        self._empty(storage)

    def reclaim(self) -> None:
        """Have the current stream wait for, and free, what other streams have given back of its memory."""
        for storage, last_use in self._held.pop(self._streams.current(), ()):
            last_use.wait()
            self._empty(storage)

    def note_freed(self, numel: int) -> None:
        """Give freed memory inside this process's heap back to the system, when a large tensor has gone.

        glibc cannot reuse the place of a freed buffer for one of the same size when alignment makes it a little larger:
        a model built or sharded layer by layer would leave a hole for each layer.
        """
        if self.device.type == "cpu" and numel >= _LARGE_NUMEL:
            with contextlib.suppress(OSError, AttributeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)


class LentTensor:
    """A 1-D tensor that has memory while it is needed. Views of it that were made while it had stay views of it."""

    def __init__(self, numel: int, dtype: torch.dtype, pool: BufferPool) -> None:
        """It has zeros at first. The memory belongs to the current stream, as all that `borrow` takes must."""
        self.tensor = torch.zeros(numel, dtype=dtype, device=pool.device)
        self._pool = pool
        self._is_borrowed = False  # from the pool

    @property
    def has_memory(self) -> bool:
        """Whether the tensor may be read."""
        return self.tensor.untyped_storage().nbytes() > 0 or not self.tensor.numel()

    def borrow(self) -> Tensor:
        """Return the tensor, with memory of undefined content where it had none."""
        if not self.has_memory:
            self._pool.lend(self.tensor.untyped_storage(), self.tensor.nbytes)
            self._is_borrowed = True
        return self.tensor

    def give_back(self) -> None:
        """Leave the tensor without memory. The current stream must have waited for all other uses of it."""
        storage = self.tensor.untyped_storage()
        if self._is_borrowed:
            self._pool.take_back(storage)
            self._is_borrowed = False
        else:
            storage.resize_(0)
