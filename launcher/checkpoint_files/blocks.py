"""Files of tensors that are written once, front to back or in any order, and verified wherever they are read.

Every tensor is divided into blocks, each with a checksum: whoever reads a range verifies the blocks that it meets.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass

import xxhash

from launcher.base.errors import CheckpointError
from launcher.checkpoint_files.place import LocalReader, Place, open_new, reader_of
from launcher.checkpoint_files.remote import RemotePath, RemoteReader
from launcher.checkpoint_files.tensor_file import MAX_HEADER_BYTES, TensorEntry, header_of, parse_header

BLOCK_BYTES = 4 * 2**20
# The kernel begins to write this much to the disk while more is copied; else it would begin at the end only. It took
# a file of 1.2 GB from 1.08 to 0.73 s (ext4).
_WRITE_AHEAD_BYTES = 16 * 2**20
_SYNC_FILE_RANGE_WRITE = 2
_DIGEST_BYTES = 8


def digest_of(data: bytes | memoryview) -> str:
    """Return the checksum of a small file, as text."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of_file(reader: LocalReader | RemoteReader) -> str:
    """Return the checksum of a file of any size, as `digest_of` has it. Raises: OSError, CheckpointError."""
    digest, buffer, place = xxhash.xxh3_128(), memoryview(bytearray(BLOCK_BYTES)), 0
    while place < reader.num_bytes:
        num_read = reader.read_into(place, buffer[: reader.num_bytes - place])
        if not num_read:
            break  # it was cut off meanwhile
        digest.update(buffer[:num_read])
        place += num_read
    return digest.hexdigest()


@dataclass(frozen=True)
class TensorSums:
    """The checksums of one file of tensors."""

    header: str
    blocks: dict[str, bytes]  # by tensor: one digest a block, one after another

    def plain(self) -> dict[str, object]:
        """Return them for JSON."""
        return {"header": self.header, "blocks": {key: digests.hex() for key, digests in self.blocks.items()}}

    @classmethod
    def of_plain(cls, plain: Mapping[str, object], where: str) -> TensorSums:
        """Return what `plain` returned. Raises: CheckpointError for anything else."""
        header, blocks = plain.get("header"), plain.get("blocks")
        try:
            if isinstance(header, str) and isinstance(blocks, dict):
                return cls(header, {str(key): bytes.fromhex(digests) for key, digests in blocks.items()})
        except (TypeError, ValueError):
            pass
        raise CheckpointError("checksums are missing or malformed", where=where)


class TensorFileWriter:
    """Writes one file. Close it in any case; what `finish` has not been called for is incomplete."""

    def __init__(
        self, path: Place, tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
    ) -> None:
        """tensors: key -> dtype by safetensors' names, shape. Raises: OSError, also where the file exists."""
        header, self.entries = header_of(tensors, metadata)
        self.num_bytes = max((entry.stop for entry in self.entries.values()), default=len(header))
        self._header_sum = digest_of(header)
        self._blocks: dict[str, bytes] = {}
        self._unwritten = range(0)  # bytes that the disk has not been asked to write
        self._path = path
        self._file = open_new(path)
        try:
            _write_all(self._file, memoryview(header), 0)
        except OSError:
            self.close()
            raise

    def write(self, key: str, data: memoryview) -> None:
        """Write one tensor, once. data: its bytes in host memory. Raises: OSError."""
        entry = self.entries[key]
        if data.nbytes != entry.num_bytes:
            raise ValueError(f"{key} has {data.nbytes} bytes, {entry.num_bytes} were planned")
        digests = bytearray()
        for start in range(0, data.nbytes, BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            digests += xxhash.xxh3_64_digest(block)
            _write_all(self._file, block, entry.start + start)
            self._write_behind(range(entry.start + start, entry.start + start + block.nbytes))
        self._blocks[key] = bytes(digests)

    def _write_behind(self, written: range) -> None:
        """Have the disk begin with what was written, once that is enough."""
        joined = range(self._unwritten.start, written.stop) if self._unwritten.stop == written.start else written
        if len(joined) >= _WRITE_AHEAD_BYTES:
            _start_writing(self._file, joined)
            joined = range(joined.stop, joined.stop)
        self._unwritten = joined

    def finish(self) -> TensorSums:
        """Wait until the file is on the disk, or in the store; return its checksums.

        Raises: OSError, CheckpointError.
        """
        missing = self.entries.keys() - self._blocks.keys()
        if missing:
            raise ValueError(f"{len(missing)} tensors were not written, such as {min(missing)}")
        if isinstance(self._path, RemotePath):
            self._path.upload(self._file)
        else:
            os.fsync(self._file)
        return TensorSums(self._header_sum, self._blocks)

    def close(self) -> None:
        """Close the file. The second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _start_writing(file: int, part: range) -> None:
    """Have the kernel write a part of a file to the disk, and do not wait. Where it cannot, `fsync` does it all."""
    call = getattr(_libc(), "sync_file_range", None)
    if call is not None:
        call(file, ctypes.c_int64(part.start), ctypes.c_int64(len(part)), _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data.nbytes:
        num_written = os.pwrite(file, data, offset)
        data, offset = data[num_written:], offset + num_written


class TensorFile:
    """One file of tensors, open for reading. What is read has been verified, if there are checksums."""

    def __init__(self, path: Place, sums: TensorSums | None, num_bytes: int | None = None) -> None:
        """sums: None for a file from elsewhere. num_bytes: that it must have, where that is known.

        Raises: CheckpointError for a file that is missing, damaged or not what the checksums are of.
        """
        self._where = str(path)
        self._sums = sums
        try:
            self._file = reader_of(path)
        except OSError as error:
            raise self._unreadable(error) from None
        try:
            self._read_header(num_bytes)
        except BaseException:
            self.close()
            raise

    def _read_header(self, num_bytes: int | None) -> None:
        found_bytes = self._file.num_bytes
        if num_bytes is not None and found_bytes != num_bytes:
            raise CheckpointError(
                f"it has {found_bytes} bytes, the manifest says {num_bytes}: it was cut off, or is another file",
                where=self._where,
            )
        length = self._read(0, 8)
        num_header_bytes = int.from_bytes(length, "little")
        if num_header_bytes > min(MAX_HEADER_BYTES, found_bytes - 8):
            raise CheckpointError("this is not a safetensors file, or it is damaged", where=self._where)
        header = self._read(8, num_header_bytes)
        if self._sums is not None and digest_of(length + header) != self._sums.header:
            raise self._damaged("its header")
        self.entries, self.metadata = parse_header(header, found_bytes, self._where)
        if self._sums is not None and self.entries.keys() != self._sums.blocks.keys():
            raise self._damaged("the list of its tensors")

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. The second call does nothing."""
        self._file.close()

    def entry(self, key: str) -> TensorEntry:
        """Return where a tensor is. Raises: CheckpointError for one that is not there."""
        if key not in self.entries:
            raise CheckpointError(f"there is no tensor {key}", where=self._where)
        return self.entries[key]

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a tensor from `start` on. Raises: CheckpointError, also for a wrong checksum."""
        entry = self.entry(key)
        stop = start + out.nbytes
        if not 0 <= start <= stop <= entry.num_bytes:
            raise CheckpointError(f"{key} has {entry.num_bytes} bytes, not {stop}", where=self._where)
        scratch: memoryview | None = None
        for first in range(start - start % BLOCK_BYTES, stop, BLOCK_BYTES):
            last = min(first + BLOCK_BYTES, entry.num_bytes)
            if first >= start and last <= stop:
                block = out[first - start : last - start]
                self._fill(entry.start + first, block)
            else:
                scratch = memoryview(bytearray(BLOCK_BYTES)) if scratch is None else scratch
                block = scratch[: last - first]
                self._fill(entry.start + first, block)
                low, high = max(first, start), min(last, stop)
                out[low - start : high - start] = block[low - first : high - first]
            self._verify(key, first // BLOCK_BYTES, block)

    def verify(self, key: str) -> None:
        """Read all of a tensor and verify it. Raises: CheckpointError."""
        entry = self.entry(key)
        scratch = memoryview(bytearray(min(BLOCK_BYTES, entry.num_bytes)))
        for start in range(0, entry.num_bytes, BLOCK_BYTES):
            self.read_into(key, start, scratch[: min(BLOCK_BYTES, entry.num_bytes - start)])

    def _verify(self, key: str, index: int, block: memoryview) -> None:
        if self._sums is None:
            return
        digest = self._sums.blocks[key][index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES]
        if xxhash.xxh3_64_digest(block) != digest:
            raise self._damaged(f"block {index} of {key}")

    def _read(self, offset: int, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        self._fill(offset, memoryview(data))
        return bytes(data)

    def _fill(self, offset: int, out: memoryview) -> None:
        while out.nbytes:
            try:
                num_read = self._file.read_into(offset, out)
            except OSError as error:
                raise self._unreadable(error) from None
            if not num_read:
                raise CheckpointError("it ends too early: it was cut off", where=self._where)
            out, offset = out[num_read:], offset + num_read

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"it is damaged: {what} has another checksum than when it was saved", where=self._where)

    def _unreadable(self, error: OSError) -> CheckpointError:
        return CheckpointError(f"it cannot be read: {error.strerror}", where=self._where)
