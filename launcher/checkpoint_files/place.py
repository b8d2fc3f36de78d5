"""Where files of checkpoints are: in a local folder, or in a store."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.base.errors import CheckpointError, CheckpointValueError

# ---- Places in object stores, by URL, through `fsspec`: `s3://`, `gs://`, `abfs://`, `memory://` ----
# [Note: a commit without rename] A store has no rename, but a put of one object is there whole or not at all. Files
# of a save have names of their own, so they replace nothing; the manifest is put after all of them, `latest` after
# it.


# Bytes that one request asks for where a file is read from front to back.
_READ_BYTES = 32 * 2**20


class RemotePath:
    """A place in a store: what is used here of `pathlib.Path`, by the same names.

    Methods raise FileNotFoundError where a file that is read is not there, and CheckpointError with the URL for
    whatever else the store says.
    """

    def __init__(self, store: Any, protocol: str, path: str) -> None:
        """store: of fsspec. path: within it, such as "bucket/run"."""
        self._store, self._protocol = store, protocol
        self._path = path if path == "/" else path.rstrip("/")

    @classmethod
    def of_url(cls, url: str) -> RemotePath:
        """Return the place a URL names. Raises: CheckpointError where nothing installed knows its kind of store."""
        protocol = url.partition("://")[0]
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise CheckpointError(
                "checkpoints in a store need fsspec, which is not installed",
                where=url,
                hint='install it with: pip install "launch-zero[remote]", and what knows the store: s3fs, gcsfs, ...',
            ) from None
        try:
            # Listings that are kept would hide what other ranks write.
            store, path = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"{protocol}:// cannot be used: {error}",
                where=url,
                hint="install what knows the store: s3fs for s3://, gcsfs for gs://, adlfs for abfs://",
            ) from None
        return cls(store, protocol, path)

    def __str__(self) -> str:
        return f"{self._protocol}://{self._path.lstrip('/')}"

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: RemotePath) -> bool:
        return str(self) < str(other)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self._store, self._protocol, f"{self._path.rstrip('/')}/{name}") if name else self

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._store, self._protocol, self._path.rpartition("/")[0] or "/")

    def absolute(self) -> RemotePath:
        return self

    # ---- reading ----

    def exists(self) -> bool:
        with self._errors_named():
            return bool(self._store.exists(self._path))

    def is_file(self) -> bool:
        with self._errors_named():
            return bool(self._store.isfile(self._path))

    def is_dir(self) -> bool:
        with self._errors_named():
            return bool(self._store.isdir(self._path))

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield what is directly below; nothing where nothing is."""
        with self._errors_named():
            try:
                found = self._store.ls(self._path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                found = []
        for path in found:
            each = RemotePath(self._store, self._protocol, path)
            if each.name and each != self:
                yield each

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yield what is directly below and has such a name."""
        return (each for each in self.iterdir() if fnmatch.fnmatchcase(each.name, pattern))

    def read_bytes(self) -> bytes:
        with self._errors_named():
            return bytes(self._store.cat_file(self._path))

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def open(self, mode: str) -> io.BytesIO:
        """Return the content of a small file as a file."""
        assert mode == "rb", "files of a store are written as a whole"
        return io.BytesIO(self.read_bytes())

    def read_range(self, start: int, stop: int) -> bytes:
        """Return some bytes of a file; fewer where it ends before."""
        with self._errors_named():
            return bytes(self._store.cat_file(self._path, start=start, end=stop))

    def size(self) -> int:
        """Return the bytes of a file."""
        with self._errors_named():
            return int(self._store.size(self._path))

    def size_below(self) -> int:
        """Return the bytes of a file, or of all files below."""
        with self._errors_named():
            return int(sum(self._store.du(self._path, total=False).values()))

    def last_write_s(self) -> float | None:
        """Return when a file was last written, since the epoch; None where the store does not say."""
        with self._errors_named():
            try:
                return float(self._store.modified(self._path).timestamp())
            except NotImplementedError:
                return None

    # ---- writing ----

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder is there as soon as something is in it."""
        del parents, exist_ok

    def write_bytes(self, content: bytes) -> None:
        """Put a small file. It is there whole or not at all, and replaces one of its name."""
        with self._errors_named(is_write=True):
            self._store.pipe_file(self._path, content)

    def upload(self, file: int) -> None:
        """Put the content of a local file, which is open: in parts where it is large."""
        with self._errors_named(is_write=True):
            self._store.put_file(f"/proc/self/fd/{file}", self._path)

    def unlink(self, *, missing_ok: bool = False) -> None:
        try:
            with self._errors_named():
                self._store.rm_file(self._path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    @contextlib.contextmanager
    def _errors_named(self, *, is_write: bool = False) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            is_missing = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
            if is_missing and not is_write:
                raise FileNotFoundError(2, "there is no such file", str(self)) from None
            text = str(error).strip().partition("\n")[0] or type(error).__name__
            raise CheckpointError(
                f"the store answers: {text}",
                where=str(self),
                hint="are bucket, credentials and endpoint right, and can this host reach it?",
            ) from error


class RemoteReader:
    """Reads one file by ranges. It asks for more than is wanted where reads follow one another."""

    def __init__(self, path: RemotePath) -> None:
        """Raises: FileNotFoundError, CheckpointError."""
        self._path = path
        self.num_bytes = path.size()
        self._kept, self._start = memoryview(b""), 0

    def read_into(self, offset: int, out: memoryview) -> int:
        """Fill as much of `out` as one request gives; return how many bytes. Raises: as `RemotePath`."""
        place = offset - self._start
        if not 0 <= place < len(self._kept):
            is_next = place == len(self._kept) and offset > 0
            wanted = max(out.nbytes, _READ_BYTES if is_next else 0)
            self._kept = memoryview(self._path.read_range(offset, min(offset + wanted, self.num_bytes)))
            self._start, place = offset, 0
        part = self._kept[place : place + out.nbytes]
        out[: part.nbytes] = part
        return part.nbytes

    def close(self) -> None:
        """Free what is kept."""
        self._kept = memoryview(b"")


# ---- Where files of checkpoints are ----


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
