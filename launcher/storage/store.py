"""Asynchronous reads and writes of a swap file.

Every request is one `preadv` or `pwritev` of a thread. System calls release Python's lock, so that N threads keep N
requests in flight. How the pages of the memory are matters more than who queues (`benchmarks/nvme.py` compares).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass

from launcher.base.errors import EngineError
from launcher.base.units import format_bytes

# ---- Host memory that a disk can read into and write from without a copy ----


# O_DIRECT wants addresses, offsets and lengths in multiples of the disk's logical blocks: 512 or 4096 bytes.
ALIGNMENT_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20  # of x86-64, and of ARM with pages of 4 KiB


def padded(num_bytes: int) -> int:
    """Return the next multiple of ALIGNMENT_BYTES."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def aligned_buffer(num_bytes: int) -> memoryview:
    """Return `num_bytes` of zeroed memory at the start of a page, a huge one where it fills any.

    `torch.frombuffer` makes a tensor of it.

    Rather ask for one large buffer and cut it: from 2 MiB on it is made of huge pages where the kernel has some, and a
    request in few pieces is quicker (2 to 3 times: `benchmarks/nvme.py`).

    The memory goes back to the system with the last view or tensor of it. Forked children do not have it: while a
    direct read is under way, fork would leave one of the two processes without the bytes (open(2), "O_DIRECT").
    """
    whole_bytes = max(padded(num_bytes), ALIGNMENT_BYTES)
    # The kernel may begin a mapping at any page. What lies before the first huge one is never touched.
    spare_bytes = _HUGE_PAGE_BYTES if whole_bytes >= _HUGE_PAGE_BYTES else 0
    memory = mmap.mmap(-1, spare_bytes + whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE_BYTES if spare_bytes else 0
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, begin, whole_bytes)  # not past the end: a last huge page would stick out
    return memoryview(memory)[begin : begin + num_bytes]


def is_aligned(view: memoryview) -> bool:
    """Whether a direct transfer can use this memory. False for read-only memory, whose address Python hides."""
    if view.readonly or len(view) % ALIGNMENT_BYTES:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNMENT_BYTES == 0


# ---- One file without a name: opened for direct transfers, given room, gone with its process ----


_NOT_OFFERED = (errno.EINVAL, errno.EOPNOTSUPP)  # how a file system says that it does not know a request
_HINTS = {
    errno.ENOSPC: "make room, or choose a folder on another disk",
    errno.EDQUOT: "the quota is used up: make room, or choose a folder on another disk",
    errno.EFBIG: "the limit of file sizes is too low: raise it with ulimit -f",
    errno.EACCES: "choose a folder that you may write to",
    errno.EROFS: "choose a folder that you may write to",
    errno.ENOENT: "create it, or mount the disk",
    errno.ENOTDIR: "choose a folder",
    errno.EIO: "the disk may be failing: see dmesg, and choose another one",
}


class SwapFile:
    """A private file in `folder` that no other process can open and that nothing can leave behind.

    It has no name (O_TMPFILE; where the file system has none it is unlinked as soon as it is open). So two jobs with
    the same folder cannot touch each other's states, and the kernel frees the space when the process ends, by SIGKILL
    too.
    """

    def __init__(self, folder: str) -> None:
        """Create the file. Raises: EngineError when that is not possible in `folder`."""
        self.folder = os.path.abspath(folder)
        self.size_bytes = 0
        try:
            with tempfile.TemporaryFile(dir=self.folder, prefix="launch-", buffering=0) as file:
                self._descriptor = os.dup(file.fileno())
            self._closer = weakref.finalize(self, os.close, self._descriptor)
            self.is_direct = _turn_on_direct(self._descriptor)
        except OSError as error:
            raise self.failed("a swap file cannot be created", error) from None

    def grow(self, num_bytes: int) -> int:
        """Reserve `num_bytes`, a multiple of ALIGNMENT_BYTES, on the disk and return their offset.

        Raises: EngineError when the disk is too full.
        """
        offset = self.size_bytes
        try:
            # Asked first: an allocation that fails would have filled the disk for everybody until then.
            if num_bytes > self.free_bytes():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _allocate(self._descriptor, offset, num_bytes)
        except OSError as error:
            raise self.failed(f"{format_bytes(num_bytes)} cannot be reserved", error) from None
        self.size_bytes += num_bytes
        return offset

    def read(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset` on. Raises: OSError."""
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"the file ends {format_bytes(len(view) - done)} too early")
            done += count

    def write(self, view: memoryview, offset: int) -> None:
        """Write all of `view` from `offset` on. Raises: OSError."""
        done = 0
        while done < len(view):
            done += os.pwritev(self._descriptor, [view[done:]], offset + done)

    def free_bytes(self) -> int:
        """Return what this user may still write to the file system."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def failed(self, what: str, error: OSError) -> EngineError:
        """Return the error that tells the user what went wrong, where, and what to do."""
        hint = _HINTS.get(error.errno or 0, "choose another folder")
        with contextlib.suppress(OSError):  # the folder itself may be what is wrong
            hint = f"{format_bytes(self.free_bytes())} are free there; {hint}"
        return EngineError(f"{what}: {error.strerror}", where=self.folder, hint=hint)

    def close(self) -> None:
        """Give the space back. No transfer may be under way. May be called twice."""
        self._closer()


def _turn_on_direct(descriptor: int) -> bool:
    """Let transfers go past the page cache; False where the file system cannot. Some refuse only the first transfer."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwritev(descriptor, [aligned_buffer(ALIGNMENT_BYTES)], 0)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return True


def _allocate(descriptor: int, offset: int, num_bytes: int) -> None:
    """Reserve blocks, so that a full disk shows now and not hours later."""
    try:
        if num_bytes:
            os.posix_fallocate(descriptor, offset, num_bytes)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
        os.ftruncate(descriptor, offset + num_bytes)


# ---- Asynchronous reads and writes ----


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
        self._waiter.shutdown()
        self._pool.shutdown()
        self._use(settings)

    def reserve(self, num_bytes: int) -> Extent:
        """Take room on the disk. Raises: EngineError when there is not enough."""
        self._check_usable()
        return Extent(self._file.grow(padded(num_bytes)), num_bytes)

    def write(self, extent: Extent, memory: memoryview, after: Callable[[], None] | None = None) -> Transfer:
        """Start writing `memory`, as long as the extent, and return at once.

        after: returns when the memory has its values; a thread calls it first. Such writes follow each other.
        Raises: EngineError when an earlier transfer has failed.
        """
        if after is None:
            return self._start(extent, memory, self._write_block, "written")
        return Transfer([self._waiter.submit(self._write_after, after, extent, memory)])

    def _write_after(self, after: Callable[[], None], extent: Extent, memory: memoryview) -> None:
        after()  # not in a thread of `_pool`: reads that come before it would have fewer
        self._start(extent, memory, self._write_block, "written").wait()

    def read(self, extent: Extent, memory: memoryview) -> Transfer:
        """Start filling `memory`, as long as the extent, and return at once.

        Raises: EngineError when an earlier transfer has failed.
        """
        return self._start(extent, memory, self._read_block, "read")

    def close(self) -> None:
        """Finish what has begun, drop what has not, and remove the file. Raises nothing: a failure stood in `wait`."""
        self._waiter.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)
        self._file.close()

    def _use(self, settings: AioSettings) -> None:
        self.settings = settings
        self._pool = futures.ThreadPoolExecutor(settings.num_requests, thread_name_prefix="launch-storage")
        self._waiter = futures.ThreadPoolExecutor(1, thread_name_prefix="launch-storage-wait")
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
