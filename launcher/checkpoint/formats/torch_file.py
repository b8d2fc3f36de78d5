"""Files of `torch.save` that others wrote, opened without running code of theirs and without reading their tensors.

torch's own unpickler of weights builds tensors, containers and numbers, and refuses whatever else a file names. What
checkpoints of DeepSpeed and of usual scripts name has a stand-in here. Files are mapped: a tensor's bytes are read when
its values are.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import pickle
import re
import struct
import types
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import CheckpointError

CHUNK_BYTES = 4 << 20
_MAX_REPEATED_NUMEL = 2**28
_OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_DAMAGED = "the file is damaged or was not written to its end; use another checkpoint"

# ---- Stand-ins for what files name, beside what torch knows ----


class ForeignObject:
    """An object of a class that is not loaded: what it had as attributes."""

    def __init__(self, *_: Any) -> None:
        """Take the arguments of any class."""


class _NumpyType:
    """A numpy dtype, as far as numbers need it."""

    def __init__(self, code: str, *_: Any) -> None:
        self.torch_dtype = _NUMPY_TYPES[code.lstrip("<|=")]

    def __setstate__(self, state: Any) -> None:
        if state[1] == ">":
            raise pickle.UnpicklingError("numbers of the other byte order")


_NUMPY_TYPES = {
    "f8": torch.float64, "f4": torch.float32, "f2": torch.float16, "b1": torch.bool,
    "i8": torch.int64, "i4": torch.int32, "i2": torch.int16, "i1": torch.int8,
    "u8": torch.uint64, "u4": torch.uint32, "u2": torch.uint16, "u1": torch.uint8,
}  # fmt: skip


class _NumpyArray:
    """A numpy array, as a tensor."""

    def __init__(self, *_: Any) -> None:
        self.tensor = torch.empty(0)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        if is_fortran:
            raise pickle.UnpicklingError("an array in Fortran's order")
        if not data:
            self.tensor = torch.empty(shape, dtype=dtype.torch_dtype)
            return
        self.tensor = torch.frombuffer(bytearray(data), dtype=dtype.torch_dtype).view(shape)


def _numpy_scalar(dtype: _NumpyType, data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=dtype.torch_dtype).item()


def _joined(*parts: str) -> str:
    return "/".join(parts).replace("//", "/")


_STAND_INS: dict[str, Callable[..., Any]] = {
    "builtins.frozenset": frozenset,
    "collections.defaultdict": lambda *_: {},
    "pathlib.PosixPath": _joined,
    "pathlib._local.PosixPath": _joined,
    "numpy.dtype": _NumpyType,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    "numpy.core.multiarray._reconstruct": _NumpyArray,
    "numpy._core.multiarray._reconstruct": _NumpyArray,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    **dict.fromkeys(
        (
            "argparse.Namespace",
            "types.SimpleNamespace",
            "deepspeed.runtime.fp16.loss_scaler.LossScaler",
            "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
            "deepspeed.utils.tensor_fragment.fragment_address",
            # Pickles name these as arguments only.
            *("numpy.ndarray", "builtins.int", "builtins.float", "builtins.list", "builtins.dict", "builtins.str"),
        ),
        ForeignObject,
    ),
}

# The classes themselves come where the script has allowed them: see `torch.serialization.add_safe_globals`.
_WITH_FIELDS = (ForeignObject, argparse.Namespace, types.SimpleNamespace)

# ---- Files ----


def open_torch_file(path: Path) -> Any:
    """Return what `torch.save` wrote to a file. Its tensors are mapped: use `read` and `load`, which keep memory small.

    Raises: CheckpointError for a file that is missing, truncated, damaged or of another kind, or that names what
    has no stand-in.
    """
    with _archive(path) as archive:
        byteorder = ""
        for member in archive.infolist():
            if member.filename.endswith(("data.pkl", "byteorder")):
                _compare(archive, member)
            if member.filename.endswith("byteorder"):
                byteorder = archive.read(member).decode(errors="replace")
    if byteorder == "big":
        raise CheckpointError("the file was written on a big-endian machine", where=str(path), hint="convert it there")
    try:
        return load_safely(path, is_mapped=True)
    except Exception as error:  # what torch raises for a file that is damaged on purpose may be anything
        raise _refused(path, error) from error


def load_safely(path: Path | str, *, is_mapped: bool) -> Any:
    """Return what `torch.save` wrote to a file, without running anything that the file names.

    is_mapped: read tensors when they are used, as is possible since torch 1.6. Raises: what `torch.load` does.
    """
    with torch.serialization.safe_globals([(found, name) for name, found in _STAND_INS.items()]):
        return torch.load(path, map_location="cpu", mmap=is_mapped, weights_only=True)


def _refused(path: Path, error: Exception) -> CheckpointError:
    said = str((error.__context__ if isinstance(error, pickle.UnpicklingError) else None) or error)
    name = re.search(r"GLOBAL (\S+)", said)
    if name is not None:
        message = f"the file asks for {name[1]}, which reading a checkpoint does not need; nothing was executed"
        hint = "use a file that you trust, saved without objects of that class (see client_state)"
        return CheckpointError(message, where=str(path), hint=hint)
    text = f"{type(error).__name__}: {said.strip().partition(chr(10))[0]}"
    if "not resizable" in said:  # what is mapped cannot grow, as torch would have it
        text = "a tensor is larger than its data"
    return CheckpointError(f"the file cannot be read, and nothing was executed: {text}", where=str(path), hint=_DAMAGED)


def verify_torch_file(path: Path) -> None:
    """Read all of a file and compare its checksums. Raises: CheckpointError for one that is damaged."""
    with _archive(path) as archive:
        for member in archive.infolist():
            _compare(archive, member)


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open the zip file that `torch.save` writes. Raises: CheckpointError for a file of another kind."""
    place = str(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if sum(each.filename.endswith("data.pkl") and each.filename.count("/") <= 1 for each in members) != 1:
                message = "the file is a zip file, but not one of torch.save"
                raise CheckpointError(message, where=place, hint="give the checkpoint's own")
            odd = next(
                (each for each in members if each.compress_type != zipfile.ZIP_STORED or each.flag_bits & 1), None
            )
            if odd is not None:
                message = f"{odd.filename} is compressed or encrypted, which torch.save does not do"
                raise CheckpointError(message, where=place, hint="use the file as it was written")
            yield archive
    except OSError as error:
        hint = "the checkpoint is incomplete: bring the file, or use another checkpoint"
        raise CheckpointError(f"the file cannot be read: {error.strerror}", where=place, hint=hint) from error
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
        raise _not_a_zip(path) from error


def _compare(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Read a part of a file. Raises: CheckpointError for one with another checksum than it had."""
    if not member.CRC:  # it was saved without checksums
        return
    try:
        with archive.open(member) as file:
            while file.read(CHUNK_BYTES):
                pass
    except (zipfile.BadZipFile, EOFError, RuntimeError, ValueError) as error:
        message = f"{member.filename} has another checksum than when it was saved, or another place"
        raise CheckpointError(message, where=str(archive.filename), hint=_DAMAGED) from error


def _not_a_zip(path: Path) -> CheckpointError:
    with path.open("rb") as file:
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


# ---- Values ----


def read(tensor: Tensor, start: int, out: Tensor) -> None:
    """Fill 1-D `out` with elements [start, start + len(out)) of a file's tensor, row-major, converted to its dtype.

    Reads only their bytes where the tensor is contiguous; else all of it. Raises: ValueError for elements that are not
    there, RuntimeError for a tensor that is sparse or otherwise has no plain values.
    """
    if start < 0 or start + out.numel() > tensor.numel():
        raise ValueError(f"elements {start} to {start + out.numel()} are wanted of a tensor of {tensor.numel()}")
    _expect_data(tensor)
    flat = tensor.detach().reshape(-1)
    size = CHUNK_BYTES // flat.itemsize
    for place in range(0, out.numel(), size):
        part = flat[start + place : start + min(place + size, out.numel())]
        out[place : place + part.numel()].copy_(part)
        _give_back(part)


def load(tensor: Tensor) -> Tensor:
    """Return a file's tensor, in memory of its own. Raises: as `read`."""
    _expect_data(tensor)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    read(tensor, 0, whole.view(-1))
    return whole


def _expect_data(tensor: Tensor) -> None:
    """Raises: ValueError for a tensor that repeats its data, as `expand` does, and would fill the memory."""
    if tensor.numel() > _MAX_REPEATED_NUMEL and tensor.nbytes > tensor.untyped_storage().nbytes():
        raise ValueError(f"a tensor of {tensor.numel()} elements is larger than its data")


def _give_back(part: Tensor) -> None:
    """Take what was read of a mapped file out of this process's memory: it would grow to the size of all files.

    The kernel reads such a page again when it is needed. Of memory that is not a file's, it would be lost: that is
    what `resizable` tells, as torch's own memory is and a part of a mapping is not. Only whole pages are given back, so
    nothing beside the tensor is touched.
    """
    if part.untyped_storage().resizable():
        return
    begin = -(-part.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = (part.data_ptr() + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    if num_bytes > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED)


def plain(value: Any) -> Any:
    """Return a value with its tensors loaded, and of objects without class the fields. Raises: as `read`."""
    if isinstance(value, Tensor):
        return load(value)
    if isinstance(value, _NumpyArray):
        return value.tensor
    if isinstance(value, _WITH_FIELDS):
        return {name: plain(each) for name, each in vars(value).items()}
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(each) for each in value)
    return value
