"""One file without a name: opened for direct transfers, given room, gone with its process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import weakref

from launcher.base.errors import EngineError
from launcher.base.units import format_bytes
from launcher.storage.buffers import ALIGNMENT_BYTES, aligned_buffer

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
