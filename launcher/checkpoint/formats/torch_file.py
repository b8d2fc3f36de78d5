"""Files of `torch.save`, opened without reading their tensors: these are read later, by ranges of elements."""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import CheckpointError
from launcher.checkpoint.formats.unpickle import NumpyArray, Pickled, SafeUnpickler, unpickle
from launcher.checkpoint.values.tree import bytes_of

CHUNK_BYTES = 4 << 20
_MAX_REPEATED_NUMEL = 2**28
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a member of a zip file: the lengths of its name and of its extra field
_OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_DAMAGED = "the file is damaged or was not written to its end; use another checkpoint"
_STORAGES = {
    "FloatStorage": torch.float32, "HalfStorage": torch.float16, "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128, "UntypedStorage": torch.uint8,
}  # fmt: skip


@dataclass(frozen=True)
class _Storage:
    """Where a file has the memory of tensors."""

    path: Path
    at: int  # first byte in the file
    num_bytes: int
    dtype: torch.dtype

    def __setstate__(self, state: Any) -> None:
        raise TypeError("a storage takes no state")

    def fill(self, start: int, out: memoryview) -> None:
        """Fill `out` with bytes from `start` on."""
        if start < 0 or start + out.nbytes > self.num_bytes:
            raise CheckpointError("a tensor is larger than its data", where=str(self.path), hint=_DAMAGED)
        with _opened(self.path) as file:
            file.seek(self.at + start)
            while out.nbytes:
                try:
                    num_read = file.readinto(out[:CHUNK_BYTES])
                except OSError as error:
                    raise _unreadable(self.path, error) from error
                if not num_read:
                    raise CheckpointError("the file ends within a tensor", where=str(self.path), hint=_DAMAGED)
                out = out[num_read:]

    def chunks(self, start: int, num_bytes: int) -> Iterator[memoryview]:
        """Yield bytes [start, start + num_bytes) in chunks, each valid until the next one."""
        buffer = memoryview(bytearray(min(CHUNK_BYTES, num_bytes)))
        for first in range(start, start + num_bytes, CHUNK_BYTES):
            chunk = buffer[: min(CHUNK_BYTES, start + num_bytes - first)]
            self.fill(first, chunk)
            yield chunk


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file. `read` takes what it needs of it, `load` all."""

    storage: _Storage
    dtype: torch.dtype
    offset: int  # of the first element, in elements
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __setstate__(self, state: Any) -> None:
        raise TypeError("a tensor takes no state")

    @property
    def place(self) -> str:
        """The file."""
        return str(self.storage.path)

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def shares(self, other: FileTensor) -> bool:
        """Whether both are the same elements of the same memory."""
        mine, theirs = ((each.storage, each.offset, each.shape, each.stride) for each in (self, other))
        return mine == theirs and self.numel > 0

    def read(self, start: int, out: Tensor) -> None:
        """Fill 1-D `out` with elements [start, start + len(out)) of the flattened tensor, converted to its dtype.

        Reads only their bytes where the tensor is contiguous; else all of it.
        """
        if start < 0 or start + out.numel() > self.numel:
            raise CheckpointError(
                f"elements {start} to {start + out.numel()} are wanted of a tensor of {self.numel}",
                where=self.place,
                hint="the file is not of this checkpoint, or damaged; use another checkpoint",
            )
        if not self._is_contiguous():
            out.copy_(self.load().reshape(-1)[start : start + out.numel()])
            return
        self._read_memory(self.offset + start, out)

    def load(self) -> Tensor:
        """Return the tensor, in memory of its own."""
        extent = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        end = (self.offset + extent) * self.dtype.itemsize if self.numel else 0
        is_repeated = self.numel * self.dtype.itemsize > self.storage.num_bytes  # as `expand` does
        if end > self.storage.num_bytes or (is_repeated and self.numel > _MAX_REPEATED_NUMEL):
            raise CheckpointError("a tensor is larger than its data", where=self.place, hint=_DAMAGED)
        if self._is_contiguous():
            whole = torch.empty(self.shape, dtype=self.dtype)
            self._read_memory(self.offset, whole.view(-1))
            return whole
        memory = torch.empty(extent, dtype=self.dtype)
        self._read_memory(self.offset, memory)
        return memory.as_strided(self.shape, self.stride).contiguous()

    def _read_memory(self, first: int, out: Tensor) -> None:
        size, filled = self.dtype.itemsize, 0
        if out.dtype == self.dtype and out.device.type == "cpu" and out.is_contiguous():
            self.storage.fill(first * size, bytes_of(out))
            return
        for chunk in self.storage.chunks(first * size, out.numel() * size):
            elements = torch.frombuffer(chunk, dtype=torch.uint8).view(self.dtype)
            out[filled : filled + elements.numel()].copy_(elements)
            filled += elements.numel()

    def _is_contiguous(self) -> bool:
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return self.numel == 0
            expected *= size
        return True


def open_torch_file(
    path: Path, functions: Mapping[str, Callable[..., Any]] | None = None, classes: tuple[str, ...] = ()
) -> Any:
    """Return what `torch.save` wrote to a file: plain values, with a `FileTensor` for every tensor.

    functions: what else the file may call, by full name. classes: full names of those whose objects become
    `Pickled`; any other is refused. Raises: CheckpointError for a file that is missing, truncated, damaged or of
    another kind, or that asks for more.
    """
    place = str(path)
    members = _Members(path)
    root = members.root
    if members.bytes_of(f"{root}byteorder", b"little") != b"little":
        raise CheckpointError("the file was written on a big-endian machine", where=place, hint="convert it there")
    pickled = members.bytes_of(f"{root}data.pkl")

    def storage(pid: Any) -> _Storage:
        kind, dtype, key, _, numel = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise ValueError(f"a reference to {kind}")
        found = members.storage(f"{root}data/{key}", dtype)
        if found.num_bytes < numel * dtype.itemsize:
            raise CheckpointError(f"tensor data {key} is cut off", where=place, hint=_DAMAGED)
        return found

    unpickler = _TorchUnpickler(io.BytesIO(pickled), place, {**_BUILDERS, **(functions or {})}, classes, storage)
    return unpickle(unpickler, place)


def verify_torch_file(path: Path) -> None:
    """Read all of a file and compare its checksums. Raises: CheckpointError for one that is damaged."""
    _Members(path).verify()


def plain(value: Any) -> Any:
    """Return a value with its tensors loaded, and of objects without class the fields."""
    if isinstance(value, FileTensor):
        return value.load()
    if isinstance(value, NumpyArray):
        return value.tensor
    if isinstance(value, Pickled):
        return {name: plain(each) for name, each in value.fields.items()}
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(each) for each in value)
    return value


class _TorchUnpickler(SafeUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) in (("torch", "Tensor"), ("torch.nn.parameter", "Parameter")):
            return name
        return super().find_class(module, name)


def _tensor(storage: Any, offset: int, shape: Any, stride: Any, *_: Any) -> FileTensor:
    return _tensor_of(storage, storage.dtype, offset, shape, stride)


def _tensor_with_dtype(
    storage: Any, offset: int, shape: Any, stride: Any, _grad: bool, _hooks: Any, dtype: Any, *_: Any
) -> FileTensor:
    return _tensor_of(storage, dtype, offset, shape, stride)


def _tensor_of(storage: Any, dtype: Any, offset: int, shape: Any, stride: Any) -> FileTensor:
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor without storage")
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or any(not isinstance(each, int) or each < 0 for each in numbers):
        raise ValueError("a tensor of an impossible shape")
    return FileTensor(storage, dtype, offset, tuple(shape), tuple(stride))


def _with_state(build: Callable[..., Any], _kind: Any, args: Any, _state: Any) -> Any:
    return build(*args)


_BUILDERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_with_dtype,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": _with_state,
}


class _Members:
    """The parts of a zip file of `torch.save`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with _opened(path) as file:
            try:
                self._infos = {info.filename: info for info in zipfile.ZipFile(file).infolist()}
            except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
                raise _not_a_zip(path) from error
            except OSError as error:
                raise _unreadable(path, error) from error
        pickles = [name for name in self._infos if name.endswith("data.pkl") and name.count("/") <= 1]
        if len(pickles) != 1:
            raise CheckpointError(
                "the file is a zip file, but not one of torch.save", where=str(path), hint="give the checkpoint's own"
            )
        self.root = pickles[0].removesuffix("data.pkl")

    def bytes_of(self, name: str, default: bytes | None = None) -> bytes:
        if name not in self._infos and default is not None:
            return default
        storage = self.storage(name, torch.uint8)
        content = b"".join(bytes(chunk) for chunk in storage.chunks(0, storage.num_bytes))
        self._compare(name, zlib.crc32(content))
        return content

    def verify(self) -> None:
        """Read all of the file in chunks. Raises: CheckpointError for a part with another checksum than it had."""
        for name in self._infos:
            storage, found = self.storage(name, torch.uint8), 0
            for chunk in storage.chunks(0, storage.num_bytes):
                found = zlib.crc32(chunk, found)
            self._compare(name, found)

    def _compare(self, name: str, found: int) -> None:
        expected = self._infos[name].CRC
        if expected not in (0, found):  # 0: it was saved without checksums
            message = f"{name} has another checksum than when it was saved"
            raise CheckpointError(message, where=str(self._path), hint=_DAMAGED)

    def storage(self, name: str, dtype: torch.dtype) -> _Storage:
        info = self._infos.get(name)
        if info is None:
            raise CheckpointError(f"the file has no {name}", where=str(self._path), hint=_DAMAGED)
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise CheckpointError(
                f"{name} is compressed or encrypted, which torch.save does not do",
                where=str(self._path),
                hint="use the file as it was written",
            )
        with _opened(self._path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            is_inside = 0 <= info.header_offset < num_bytes
            header = os.pread(file.fileno(), _LOCAL_HEADER.size, info.header_offset) if is_inside else b""
            if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
                raise CheckpointError(f"{name} is not where the file says", where=str(self._path), hint=_DAMAGED)
            at = info.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
            if at + info.file_size > num_bytes:
                raise CheckpointError(f"the file ends within {name}", where=str(self._path), hint=_DAMAGED)
        return _Storage(self._path, at, info.file_size, dtype)


def _opened(path: Path) -> io.FileIO:
    try:
        return io.FileIO(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    hint = "the checkpoint is incomplete: bring the file, or use another checkpoint"
    return CheckpointError(f"the file cannot be read: {error.strerror}", where=str(path), hint=hint)


def _not_a_zip(path: Path) -> CheckpointError:
    with _opened(path) as file:
        begin = file.read(len(_OLD_FORMAT))
    if begin == _OLD_FORMAT:
        return CheckpointError(
            "the file is in torch's old format, which is not read",
            where=str(path),
            hint='save with "checkpoint": {"checkpoint_serialization": true}, or torch.load it and torch.save it again',
        )
    if begin[:4] == b"PK\x03\x04":
        return CheckpointError("the end of the file is missing", where=str(path), hint=_DAMAGED)
    return CheckpointError("the file is not one of torch.save", where=str(path), hint=_DAMAGED)
