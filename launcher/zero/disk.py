"""Memory that is on disk except around its use.

What swaps is the memory under a storage: every tensor and view of it sees its values again once it is back.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum, auto

import torch
from torch import Tensor

from launcher.comm.buffers import BufferPool
from launcher.comm.device import PinnedMemory
from launcher.comm.streams import PASSED, StreamEvent
from launcher.storage.store import AioSettings, Extent, Store, Transfer, aligned_buffer, padded

# Writes of single tensors in the background: each keeps its memory until it has ended.
MAX_WRITES = 2
# Tensors that copies to a device still read after their use: each keeps its memory until these have ended.
MAX_COPIED = 2


class SwapState(Enum):
    """Where the values are.

    OUT -> READING (start_reading) -> IN (bring_in) -> WRITING (send_out) -> OUT (finish_write). `drop` leads to OUT,
    and to COPIED first where a device still copies from the memory.
    """

    OUT = auto()  # on disk only, if anywhere: there is no memory
    READING = auto()  # the memory belongs to a read
    IN = auto()
    WRITING = auto()  # the memory may be read; it goes back when the write has ended
    COPIED = auto()  # the memory, with the values, goes back when a copy has ended


class Disk:
    """Swap space of one rank in one folder, with the memory that what is in use has in the meantime."""

    def __init__(
        self, folder: str, settings: AioSettings, *, writes_behind: bool = False, pins_memory: bool = False
    ) -> None:
        """writes_behind: a unit's states may still be written while the next unit's are updated.

        pins_memory: a GPU copies from and to the memory. Raises: EngineError for a folder that cannot be written.
        """
        self.store = Store(folder, settings)
        # The garbage collector runs in any thread, also in one that is just starting and holds locks of `threading`,
        # which waiting for the store's threads needs. A thread of its own waits, and starting it takes no such lock.
        weakref.finalize(self, _thread.start_new_thread, self.store.close, ()).atexit = False
        pinned = PinnedMemory() if pins_memory else None
        self.memory = BufferPool(torch.device("cpu"), lambda num_bytes: _aligned_storage(num_bytes, pinned))
        self.writes_behind = writes_behind
        self._writing: deque[Swapped] = deque()
        self._copied: deque[Swapped] = deque()

    def register_write(self, swapped: Swapped) -> None:
        """Remember whose memory a write has."""
        self._writing.append(swapped)

    def drain(self, *, max_writes: int) -> None:
        """Wait until at most so many writes are in flight, and take their memory back."""
        while len(self._writing) > max_writes:
            self._writing.popleft().finish_write()

    def register_copied(self, swapped: Swapped) -> None:
        """Remember whose memory a copy to a device has."""
        self._copied.append(swapped)
        self.reclaim()

    def reclaim(self, *, max_copied: int = MAX_COPIED) -> None:
        """Take the memory back whose copies have ended, and wait for the oldest where there are more than so many."""
        while self._copied and (len(self._copied) > max_copied or self._copied[0].is_copied):
            self._copied.popleft().finish_copy()


def _aligned_storage(num_bytes: int, pinned: PinnedMemory | None) -> torch.UntypedStorage:
    if pinned is not None:
        return pinned.empty(num_bytes)
    return torch.frombuffer(aligned_buffer(num_bytes), dtype=torch.uint8).untyped_storage()


class Swapped:
    """The memory of one storage. Transfers fail with an EngineError where they are waited for."""

    def __init__(self, disk: Disk, tensor: Tensor, extent: Extent | None = None) -> None:
        """Take a tensor's memory over; its values are in memory only, until they are sent out.

        extent: room reserved before. Raises: EngineError when the disk has no room.
        """
        self._disk = disk
        self._storage = tensor.untyped_storage()
        self._num_bytes = self._storage.nbytes()
        self._extent = extent or disk.store.reserve(self._num_bytes)
        self._is_foreign = True  # memory from elsewhere, not from the disk's pool
        self._transfer: Transfer | None = None
        self._last_use: StreamEvent = PASSED  # of the memory by a copy from or to a device
        self.state = SwapState.IN

    def _memory(self) -> memoryview:
        memory = (ctypes.c_ubyte * self._num_bytes).from_address(self._storage.data_ptr())
        # A transfer keeps the memory alive, should everything else be gone before it has ended.
        memory.owner = self._storage  # type: ignore[attr-defined]
        return memoryview(memory).cast("B")

    def used_until(self, event: StreamEvent) -> None:
        """Have whoever gets the memory next wait for a copy from or to a device. It is in memory now."""
        self._last_use = event

    def start_reading(self) -> None:
        """Start bringing the values in, when they are out."""
        if self.state is SwapState.OUT:
            self._lend()
            self._transfer = self._disk.store.read(self._extent, self._memory())
            self.state = SwapState.READING

    def bring_in(self, *, reads: bool = True) -> None:
        """Return when the memory is there, with the values; without them (`reads=False`) they are undefined."""
        if reads:
            self.start_reading()
        elif self.state is SwapState.OUT:
            self._lend()
        self._end_transfer()
        if self.state is SwapState.COPIED:
            self._last_use.synchronize()  # the values may be changed
        self.state = SwapState.IN

    def send_out(self, *, max_writes: int = MAX_WRITES) -> None:
        """Start writing the values to disk; the memory goes back once they are there.

        max_writes: how many writes of this disk may still be in flight when this returns.
        """
        after = None if self._last_use.has_passed else self._last_use.synchronize
        self._transfer = self._disk.store.write(self._extent, self._memory(), after)
        self.state = SwapState.WRITING
        self._disk.register_write(self)
        self._disk.drain(max_writes=max_writes)

    def finish_write(self) -> None:
        """Wait for a write, unless the values have been brought back in since it began."""
        if self.state is SwapState.WRITING and self._transfer is not None:
            self._end_transfer()
            self._take_back()

    def drop(self) -> None:
        """Give the memory back without writing: what is on disk, if anything, is what counts."""
        if self.state is SwapState.READING:
            self._end_transfer()
        if self.state in (SwapState.READING, SwapState.IN):
            if self._last_use.has_passed:
                self._take_back()
            else:
                self.state = SwapState.COPIED
                self._disk.register_copied(self)

    @property
    def is_copied(self) -> bool:
        """Whether no copy uses the memory any more."""
        return self._last_use.has_passed

    def finish_copy(self) -> None:
        """Wait for the copy that has the memory, unless the values have been brought back in since it began."""
        if self.state is SwapState.COPIED:
            self._last_use.synchronize()
            self._take_back()

    def wait_for_writes(self) -> None:
        """Wait for every write of the disk: none may come after what is written next to this."""
        self._disk.drain(max_writes=0)

    def _end_transfer(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()
            self._transfer = None

    def _lend(self) -> None:
        self._disk.reclaim()
        self._disk.memory.lend(self._storage, self._num_bytes)
        self._is_foreign = False

    def _take_back(self) -> None:
        if self._is_foreign:
            self._storage.resize_(0)
            self._disk.memory.note_freed(self._num_bytes)
        else:
            self._disk.memory.take_back(self._storage)
        self._last_use = PASSED
        self.state = SwapState.OUT


class UnitSwap:
    """What one unit's optimizer works on: master, states and gradient come in for its update and go out after it."""

    def __init__(self, disk: Disk, master: Swapped, gradient: Swapped) -> None:
        self._disk = disk
        self._master = master
        self._gradient = gradient
        self._states: dict[int, tuple[Tensor, Swapped]] = {}  # by storage; the tensor keeps the storage's name its own
        self._room: list[Extent] = []  # of the states
        self._free: list[Extent] = []  # parts of it that no state has

    def reserve(self, sizes_bytes: Iterable[int]) -> None:
        """Take room for states that will exist after the first step. Raises: EngineError when there is none."""
        self._add_room(sum(map(padded, sizes_bytes)))

    def _add_room(self, num_bytes: int) -> None:
        self._room.append(self._disk.store.reserve(num_bytes))
        self._free.append(self._room[-1])

    def _take_room(self, num_bytes: int) -> Extent:
        """Return room for one tensor of states, cut from what was reserved; more of it where that was not known."""
        needed = padded(num_bytes)
        if all(extent.num_bytes < needed for extent in self._free):
            self._add_room(needed)
        index = next(index for index, extent in enumerate(self._free) if extent.num_bytes >= needed)
        found = self._free[index]
        self._free[index] = Extent(found.offset + needed, found.num_bytes - needed)
        return Extent(found.offset, num_bytes)

    def forget_states(self) -> None:
        """Make room for states that take the place of those there are."""
        self._disk.drain(max_writes=0)
        self._states.clear()
        self._free = list(self._room)

    @contextlib.contextmanager
    def with_memory(self) -> Iterator[None]:
        """Have memory without values under master and gradient, so that views of them can be made."""
        for swapped in (self._master, self._gradient):
            swapped.bring_in(reads=False)
        yield
        self.drop()

    def start_reading(self) -> None:
        """Start bringing everything in: its update comes soon."""
        for swapped in self._all():
            swapped.start_reading()

    def bring_in(self) -> None:
        """Return when everything is in memory."""
        self.start_reading()
        for swapped in self._all():
            swapped.bring_in()

    def send_out(self, states: Iterable[Tensor], *, keeps_gradient: bool = False, after: StreamEvent = PASSED) -> None:
        """Write master and states back, and the gradient if it is kept. states: those the optimizer has now.

        after: the last copy of the master to a device.
        """
        self._master.used_until(after)
        for state in states:
            storage = state.untyped_storage()
            if storage._cdata not in self._states:
                self._states[storage._cdata] = (state, Swapped(self._disk, state, self._take_room(storage.nbytes())))
        changed = [self._master, *(swapped for _, swapped in self._states.values())]
        if keeps_gradient:
            changed.append(self._gradient)
        else:
            self._gradient.drop()
        for swapped in changed:
            swapped.send_out(max_writes=2 * len(changed))
        self._disk.drain(max_writes=len(changed) if self._disk.writes_behind else 0)

    def drop(self) -> None:
        """Give the memory of everything back without writing."""
        for swapped in self._all():
            swapped.drop()

    def _all(self) -> list[Swapped]:
        return [self._master, self._gradient, *(swapped for _, swapped in self._states.values())]
