"""Asynchronous reads and writes of a swap file.

Every request is one `preadv` or `pwritev` of a thread. System calls release Python's lock, so that N threads keep N
requests in flight. How the pages of the memory are matters more than who queues (`benchmarks/nvme.py` compares).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass

from launcher.base.errors import EngineError
from launcher.base.units import format_bytes
from launcher.storage.buffers import aligned_buffer, is_aligned, padded
from launcher.storage.swapfile import SwapFile

_MAX_REQUESTS = 128  # threads; no disk is quicker with more requests of the usual sizes


@dataclass(frozen=True)
class AioSettings:
    """The `aio` section: how a disk is kept busy."""

    block_size_bytes: int  # of one request
    queue_depth: int  # requests that one thread of a transfer keeps in flight
    num_threads: int  # of one transfer: `intra_op_parallelism`

    @property
    def request_bytes(self) -> int:
        """Bytes of one request: whole pages, because a direct transfer takes nothing else."""
        return padded(self.block_size_bytes)

    @property
    def num_requests(self) -> int:
        """Requests in flight at the same time. Ours take a thread each, whichever of the two keys asks for them."""
        return min(self.queue_depth * self.num_threads, _MAX_REQUESTS)


@dataclass(frozen=True)
class Extent:
    """A range of a store."""

    offset: int
    num_bytes: int


class Transfer:
    """Bytes on their way between memory and disk. The memory is the store's until `wait` has returned."""

    def __init__(self, requests: list[futures.Future[None]]) -> None:
        self._requests = requests

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return all(request.done() for request in self._requests)

    def wait(self) -> None:
        """Return when all bytes have arrived. Raises: EngineError when one did not; the memory is free then, too."""
        futures.wait(self._requests)
        for request in self._requests:
            request.result()


class Store:
    """The swap space of one rank in one folder: reserve extents, then write and read them, asynchronously.

    Transfers run at the same time and in any order: wait for a write before the same extent is read or written again.
    After a failed transfer every call raises its error. Memory is the caller's; the store itself holds one block for
    each request in flight, and only when a caller's memory is not aligned (`aligned_buffer` is).

    Forked children are refused: threads do not survive a fork, and the file would be shared. At the end of the
    interpreter transfers that were started are finished; whatever ends the process, the file goes with it.
    """

    def __init__(self, folder: str, settings: AioSettings) -> None:
        """Create the file in `folder`, which must exist. Raises: EngineError."""
        self._file = SwapFile(folder)
        self._use(settings)
        self._pid = os.getpid()
        self._failure: EngineError | None = None

    @property
    def notice(self) -> str | None:
        """What a user should know about the folder, once."""
        if self._file.is_direct:
            return None
        return f"{self._file.folder}: no O_DIRECT on this file system, reads and writes go through the page cache"

    @property
    def folder(self) -> str:
        """Where the file is."""
        return self._file.folder

    @property
    def size_bytes(self) -> int:
        """Bytes reserved on disk."""
        return self._file.size_bytes

    def tune(self, settings: AioSettings) -> None:
        """Go on with other settings, once what was started has ended."""
        self._pool.shutdown()
        self._use(settings)

    def reserve(self, num_bytes: int) -> Extent:
        """Take room on the disk. Raises: EngineError when there is not enough."""
        self._check_usable()
        return Extent(self._file.grow(padded(num_bytes)), num_bytes)

    def write(self, extent: Extent, memory: memoryview) -> Transfer:
        """Start writing `memory`, as long as the extent, and return at once.

        Raises: EngineError when an earlier transfer has failed.
        """
        return self._start(extent, memory, self._write_block, "written")

    def read(self, extent: Extent, memory: memoryview) -> Transfer:
        """Start filling `memory`, as long as the extent, and return at once.

        Raises: EngineError when an earlier transfer has failed.
        """
        return self._start(extent, memory, self._read_block, "read")

    def close(self) -> None:
        """Finish what has begun, drop what has not, and remove the file. Raises nothing: a failure stood in `wait`."""
        self._pool.shutdown(cancel_futures=True)
        self._file.close()

    def _use(self, settings: AioSettings) -> None:
        self.settings = settings
        self._pool = futures.ThreadPoolExecutor(settings.num_requests, thread_name_prefix="launch-storage")
        self._blocks = threading.local()

    def _start(
        self, extent: Extent, memory: memoryview, move: Callable[[memoryview, int], None], verb: str
    ) -> Transfer:
        self._check_usable()
        memory, step = memory.cast("B"), self.settings.request_bytes
        if len(memory) != extent.num_bytes:
            raise ValueError(f"{len(memory)} bytes of memory for an extent of {extent.num_bytes} bytes")
        blocks = deque((memory[at : at + step], extent.offset + at) for at in range(0, len(memory), step))
        what = f"{format_bytes(len(memory))} could not be {verb}"
        num_threads = min(len(blocks), self.settings.num_requests)
        return Transfer([self._pool.submit(self._move_blocks, blocks, move, what) for _ in range(num_threads)])

    def _move_blocks(
        self, blocks: deque[tuple[memoryview, int]], move: Callable[[memoryview, int], None], what: str
    ) -> None:
        """Take blocks of a transfer, as other threads do, until none is left."""
        with contextlib.suppress(IndexError):  # `popleft` needs no lock, and says so when another thread took the last
            while self._failure is None:
                block = blocks.popleft()
                try:
                    move(*block)
                except OSError as error:
                    self._failure = self._file.failed(what, error)
        self._check_usable()

    def _write_block(self, view: memoryview, offset: int) -> None:
        if self._file.is_direct and not is_aligned(view):
            block = self._own_block(len(view))
            block[: len(view)] = view
            view = block
        self._file.write(view, offset)

    def _read_block(self, view: memoryview, offset: int) -> None:
        if not self._file.is_direct or is_aligned(view):
            self._file.read(view, offset)
            return
        block = self._own_block(len(view))
        self._file.read(block, offset)
        view[:] = block[: len(view)]

    def _own_block(self, num_bytes: int) -> memoryview:
        """Return whole pages of aligned memory for `num_bytes`, this thread's own."""
        if not hasattr(self._blocks, "memory"):
            self._blocks.memory = aligned_buffer(self.settings.request_bytes)
        memory: memoryview = self._blocks.memory
        return memory[: padded(num_bytes)]

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if os.getpid() != self._pid:
            raise EngineError(
                f"the states on disk belong to process {self._pid}, and this is a fork of it",
                where=self._file.folder,
                hint='use the engine in the process that made it; data loaders: multiprocessing_context="spawn"',
            )
