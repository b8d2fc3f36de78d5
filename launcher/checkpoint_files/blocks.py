"""Files of tensors that are written once, front to back or in any order, and verified wherever they are read.

Every tensor is divided into blocks, each with a checksum: whoever reads a range verifies the blocks that it meets.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from launcher.base.errors import CheckpointError
from launcher.checkpoint_files.place import LocalReader, Place, RemotePath, RemoteReader, open_new, reader_of

# ---- The header of a safetensors file: which tensor is where. https://huggingface.co/docs/safetensors ----


# By the names of safetensors.
DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # as the format has it
METADATA = "__metadata__"
# Data begins at a multiple of this, so that every element is aligned.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # first byte, from the beginning of the file
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def header_of(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorEntry]]:
    """Return the first bytes of a file of these tensors, and where each goes. tensors: key -> dtype, shape.

    Wider types come first, so that every element is aligned; else they keep their order.
    """
    keys = sorted(tensors, key=lambda key: -DTYPE_BYTES[tensors[key][0]])
    plain: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    places, offset = {}, 0
    for key in keys:
        dtype, shape = tensors[key]
        stop = offset + DTYPE_BYTES[dtype] * math.prod(shape)
        plain[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        places[key], offset = (offset, stop), stop
    text = json.dumps(plain, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT_BYTES)
    begin = len(text) + 8
    entries = {key: TensorEntry(*tensors[key], start + begin, stop + begin) for key, (start, stop) in places.items()}
    return len(text).to_bytes(8, "little") + text, entries


def parse_header(text: bytes, num_file_bytes: int, where: str) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return tensors and metadata of a header. text: from the ninth byte of the file on; where: the file, for errors.

    Raises: CheckpointError for anything that the format does not allow, such as tensors that overlap.
    """
    try:
        plain = json.loads(text, object_pairs_hook=_without_repetition)
        metadata = plain.pop(METADATA, {})
        begin = len(text) + 8
        entries = {key: _entry(value, begin) for key, value in plain.items()}
        if not all(isinstance(word, str) for pair in metadata.items() for word in pair):
            raise ValueError("metadata that is not text")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(f"its header cannot be read ({error})", where) from None
    end = begin
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != end:
            raise _damaged(f"the tensor {key} does not begin where the one before it ends", where)
        end = entry.stop
    if end != num_file_bytes:
        raise _damaged(f"it has {num_file_bytes} bytes, its header describes {end}", where)
    return entries, metadata


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def _entry(plain: Mapping[str, Any], begin: int) -> TensorEntry:
    dtype, shape, (start, stop) = plain["dtype"], plain["shape"], plain["data_offsets"]
    numbers = [*shape, start, stop]
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ValueError("a size that is not a number")
    if DTYPE_BYTES[dtype] * math.prod(shape) != stop - start:
        raise ValueError(f"the shape {shape} does not fit {stop - start} bytes of {dtype}")
    return TensorEntry(dtype, tuple(shape), start + begin, stop + begin)


def _damaged(what: str, where: str) -> CheckpointError:
    return CheckpointError(f"this is not a safetensors file, or it is damaged: {what}", where=where)


# ---- Files of tensors ----


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
        self.write_pieces(key, [data])

    def write_pieces(self, key: str, pieces: Iterable[memoryview]) -> None:
        """Write one tensor, once. Raises: OSError.

        pieces: its bytes in host memory, front to back; all but the last have whole blocks. Each is done with when the
        next one is asked for.
        """
        entry = self.entries[key]
        digests, place = bytearray(), entry.start
        for data in pieces:
            for start in range(0, data.nbytes, BLOCK_BYTES):
                block = data[start : start + BLOCK_BYTES]
                if place + block.nbytes > entry.stop:
                    raise ValueError(f"{key} has more than the {entry.num_bytes} bytes that were planned")
                digests += xxhash.xxh3_64_digest(block)
                _write_all(self._file, block, place)
                self._write_behind(range(place, place + block.nbytes))
                place += block.nbytes
        if place != entry.stop:
            raise ValueError(f"{key} has {place - entry.start} bytes, {entry.num_bytes} were planned")
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
