"""Where files of checkpoints are: in a local folder, or in a store."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from launcher.base.errors import CheckpointValueError
from launcher.checkpoint_files.remote import RemotePath, RemoteReader

Place = Path | RemotePath
_LARGE_READ_BYTES = 2**20
_READ_AHEAD_BYTES = 16 * 2**20


def place_of(text: str | os.PathLike[str] | RemotePath) -> Place:
    """Return the place that a path or a URL names.

    Raises: CheckpointError for a store that cannot be used, and where there is no path: "" would be the working folder.
    """
    if isinstance(text, RemotePath):
        return text
    if not isinstance(text, str | os.PathLike) or not os.fspath(text):
        raise CheckpointValueError(
            f"{text!r} names no folder for checkpoints", hint='give a path, such as "checkpoints"'
        )
    text = os.fspath(text)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return Path(text)
    return Path(rest) if scheme in ("file", "local") else RemotePath.of_url(text)


def children(place: Place) -> list[Place]:
    """Return what is in a folder, by name; nothing where it is none."""
    found: list[Place] = list(place.iterdir()) if place.is_dir() else []
    return sorted(found, key=lambda each: each.name)


def size_of(place: Place) -> int:
    """Return the bytes of a file. Raises: OSError, CheckpointError."""
    return place.stat().st_size if isinstance(place, Path) else place.size()


class LocalReader:
    """Reads one local file by ranges."""

    def __init__(self, path: Path) -> None:
        """Raises: OSError."""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.num_bytes = os.fstat(self._file).st_size

    def read_into(self, offset: int, out: memoryview) -> int:
        """Fill as much of `out` as one call gives; return how many bytes. Raises: OSError."""
        num_read = os.preadv(self._file, [out], offset)
        if out.nbytes >= _LARGE_READ_BYTES:  # one of several: the disk reads on while this one is verified
            os.posix_fadvise(self._file, offset + num_read, _READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        return num_read

    def close(self) -> None:
        """Close the file. The second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def reader_of(place: Place) -> LocalReader | RemoteReader:
    """Open a file for reading. Raises: OSError, CheckpointError."""
    return LocalReader(place) if isinstance(place, Path) else RemoteReader(place)


def open_new(place: Place) -> int:
    """Open a new file for writing. For a store that is a local one without a name: upload it when it is complete.

    Raises: OSError, also where a local file exists.
    """
    if isinstance(place, Path):
        return os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    file, path = tempfile.mkstemp(prefix="launch-checkpoint-")
    os.unlink(path)  # nothing is left, however this process ends
    return file
