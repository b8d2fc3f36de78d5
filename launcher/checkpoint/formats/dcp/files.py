"""The files of `torch.distributed.checkpoint` (DCP): what `.metadata` says is where, and the pieces of `*.distcp`.

`.metadata` is a pickle. It is read with classes of our own in place of the few that DCP writes; a name of anything else
is an error, so nothing that the file names is ever called.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import CheckpointError
from launcher.checkpoint.values.tree import DAMAGE
from launcher.checkpoint_files.manifest import FILE_NAME
from launcher.checkpoint_files.place import LocalReader, Place, RemoteReader, reader_of

METADATA = ".metadata"
_MAX_NUMEL = 2**63


@dataclass(frozen=True)
class Piece:
    """Bytes of a file that `torch.save` wrote."""

    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: what one rank had of it."""

    offsets: tuple[int, ...]  # of its first element, by dimension
    sizes: tuple[int, ...]
    piece: Piece


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor in boxes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds, by key of its flattened state dict."""

    tensors: Mapping[str, ChunkedTensor]
    values: Mapping[str, Piece]  # anything but tensors
    paths: Mapping[str, tuple[str | int, ...]]  # where each was in the nested state dict


def read_contents(folder: Place) -> Contents:
    """Read `.metadata`. Raises: CheckpointError for one that is missing, damaged, or names what DCP does not write."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError("there is no .metadata of torch.distributed.checkpoint", where=str(folder)) from None
    except DAMAGE as error:
        raise CheckpointError(f"it cannot be read ({error})", where=str(path), hint=_OTHER) from None
    try:
        return _checked(metadata)
    except DAMAGE as error:
        raise CheckpointError(f"it is damaged ({error})", where=str(path), hint=_OTHER) from None


_OTHER = "use another checkpoint; only what torch.distributed.checkpoint itself writes is read"


class PieceReader:
    """Reads pieces of the files of one folder. It keeps the last one: at most one is in memory."""

    def __init__(self, folder: Place) -> None:
        self._folder = folder
        self._kept: tuple[Piece, Tensor] | None = None

    def tensor(self, of: ChunkedTensor, chunk: Chunk) -> Tensor:
        """Return the values of a chunk, in host memory. Raises: CheckpointError."""
        if self._kept is not None and self._kept[0] == chunk.piece:
            return self._kept[1]
        self._kept = None
        found = self.value(chunk.piece)
        fits = isinstance(found, Tensor) and found.layout == torch.strided and found.device.type == "cpu"
        if not fits or tuple(found.shape) != chunk.sizes or found.dtype != of.dtype:
            raise CheckpointError(
                f"at {chunk.piece.start} there is no {of.dtype} of shape {list(chunk.sizes)}, as .metadata says",
                where=str(self._folder / chunk.piece.file),
                hint="files of two checkpoints were mixed, or it is damaged: use another one",
            )
        values: Tensor = found.detach()
        self._kept = chunk.piece, values
        return values

    def value(self, piece: Piece) -> Any:
        """Return what `torch.save` was given; never code. Raises: CheckpointError."""
        path = self._folder / piece.file
        try:
            with contextlib.closing(reader_of(path)) as reader:
                if reader.num_bytes < piece.start + piece.num_bytes:
                    raise CheckpointError("it ends too early: it was cut off", where=str(path), hint="use another one")
                part: Any = io.BufferedReader(_Part(reader, piece))
                return torch.load(part, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise CheckpointError("it is missing", where=str(path), hint="copy the checkpoint again") from None
        except DAMAGE as error:
            text = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"what is at {piece.start} cannot be read: {text}", where=str(path)) from None

    def close(self) -> None:
        """Free the piece that is kept."""
        self._kept = None


class _Part(io.RawIOBase):
    """A piece of a file as a file."""

    def __init__(self, reader: LocalReader | RemoteReader, piece: Piece) -> None:
        self._reader, self._piece, self._at = reader, piece, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._piece.num_bytes}[whence]
        self._at = max(0, begin + offset)
        return self._at

    def readinto(self, out: Any) -> int:
        room = memoryview(out)[: max(0, self._piece.num_bytes - self._at)]
        num_read = self._reader.read_into(self._piece.start + self._at, room)
        self._at += num_read
        return num_read


# ---- the pickle ----


class _Plain:
    """What a class of DCP's becomes: its fields as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class _Unpickler(pickle.Unpickler):
    """Knows the names that DCP writes. A class or function it returns exists for this file alone."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._known = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._known:
            return self._known[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def _stand_ins() -> dict[tuple[str, str], Any]:
    """Return what stands for each name. They are made anew each time: a pickle may set attributes of what it names."""
    checkpoint = "torch.distributed.checkpoint"

    class Index(_Plain):
        def __hash__(self) -> int:
            return hash((self.fqn, self.offset))

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Index) and (self.fqn, self.offset) == (other.fqn, other.offset)

    class Properties(_Plain):
        def __setstate__(self, state: Any) -> None:
            self.dtype, self.layout = state[:2]

    found: dict[tuple[str, str], Any] = {
        (f"{checkpoint}.metadata", name): type(name, (_Plain,), {})
        for name in ("Metadata", "ChunkStorageMetadata", "TensorStorageMetadata", "BytesStorageMetadata", "StorageMeta")
    }
    found[f"{checkpoint}.metadata", "MetadataIndex"] = Index
    found[f"{checkpoint}.metadata", "TensorProperties"] = Properties
    found[f"{checkpoint}.metadata", "_MEM_FORMAT_ENCODING"] = lambda value: value
    found[f"{checkpoint}.filesystem", "_StorageInfo"] = type("_StorageInfo", (_Plain,), {})
    found["torch", "Size"] = lambda sizes=(): tuple(sizes)
    found["torch.serialization", "_get_layout"] = lambda text: text
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"):
            found[module, name] = lambda *parts: "/".join(map(str, parts))
    return found


def _checked(metadata: Any) -> Contents:
    """Return what the pickle said, if it is what DCP writes. Raises: one of `DAMAGE`."""
    described, stored = dict(metadata.state_dict_metadata), dict(metadata.storage_data)
    pieces = {(index.fqn, index.offset): _piece(info) for index, info in stored.items()}
    tensors: dict[str, ChunkedTensor] = {}
    values: dict[str, Piece] = {}
    for key, each in described.items():
        if not isinstance(key, str):
            raise TypeError(f"{key!r} is not a key")
        if type(each).__name__ == "BytesStorageMetadata":
            values[key] = pieces[key, None]
        elif type(each).__name__ == "TensorStorageMetadata":
            tensors[key] = _tensor(key, each, pieces)
        else:
            raise TypeError(f"{key} is neither a tensor nor a value")
    paths: dict[str, tuple[str | int, ...]] = {key: (key,) for key in described}
    for key, path in dict(metadata.planner_data or {}).items():
        if key in paths:
            paths[key] = tuple(part if isinstance(part, int) else str(part) for part in path)
    return Contents(tensors, values, paths)


def _tensor(key: str, described: Any, pieces: Mapping[Any, Piece]) -> ChunkedTensor:
    shape, dtype = _sizes(described.size), described.properties.dtype
    if not isinstance(dtype, torch.dtype) or math.prod(shape) >= _MAX_NUMEL:
        raise ValueError(f"{key} has no type, or no shape")
    chunks = []
    for each in described.chunks:
        offsets, sizes = _sizes(each.offsets), _sizes(each.sizes)
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"a chunk of {key} has other dimensions")
        if any(offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a chunk of {key} is outside of it")
        chunks.append(Chunk(offsets, sizes, pieces[key, offsets]))
    return ChunkedTensor(dtype, shape, tuple(chunks))


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(size) is int and 0 <= size < _MAX_NUMEL for size in value):
        raise ValueError(f"{value!r} is not a shape")
    return value


def _piece(info: Any) -> Piece:
    if info.transform_descriptors:
        raise ValueError(f"an extension wrote it: {info.transform_descriptors}")
    name, (start, num_bytes) = info.relative_path, _sizes((info.offset, info.length))
    if not isinstance(name, str) or not FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a file of a checkpoint")
    return Piece(name, start, num_bytes)
