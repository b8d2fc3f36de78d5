"""Unpickling of files that others wrote, without running anything they ask for.

A pickle may name any function and have it called. Here it gets those on a list: what builds tensors, containers and
numbers. Objects of DeepSpeed's and users' classes become `Pickled`: the fields, without the class.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import IO, Any

import torch

from launcher.base.errors import CheckpointError


class Pickled:
    """The fields of an object whose class is not loaded."""

    fields: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, *_: Any) -> None:
        """Take the arguments of any class."""

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if part is not None:
                self.fields = {**self.fields, **dict(part)}


class Function:
    """A function that a pickle may call. It takes no state: a pickle cannot change it."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError("a function takes no state")

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a function takes no state")


class NumpyType:
    """A numpy dtype, as far as single numbers need it."""

    __slots__ = ("torch_dtype",)

    def __init__(self, code: str) -> None:
        self.torch_dtype = _NUMPY_TYPES[code.lstrip("<|=")]

    def __setstate__(self, state: Any) -> None:
        if state[1] == ">":
            raise pickle.UnpicklingError("numbers of the other byte order")


_NUMPY_TYPES = {
    "f8": torch.float64, "f4": torch.float32, "f2": torch.float16, "b1": torch.bool,
    "i8": torch.int64, "i4": torch.int32, "i2": torch.int16, "i1": torch.int8,
    "u8": torch.uint64, "u4": torch.uint32, "u2": torch.uint16, "u1": torch.uint8,
}  # fmt: skip


class NumpyArray:
    """A numpy array while it is unpickled."""

    __slots__ = ("tensor",)

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


def _numpy_scalar(dtype: NumpyType, data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=dtype.torch_dtype).item()


def _encoded(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"the encoding {encoding}")
    return text.encode("latin-1")


def _bytearray(text: str | bytes = b"", encoding: str = "latin-1") -> bytearray:
    return bytearray(text if isinstance(text, bytes) else _encoded(text, encoding))


def _joined(*parts: str) -> str:
    return "/".join(parts).replace("//", "/")


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": lambda *_: {},
    "collections.Counter": dict,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "builtins.bytearray": _bytearray,
    "_codecs.encode": _encoded,
    "pathlib.PosixPath": _joined,
    "pathlib._local.PosixPath": _joined,
    "torch.Size": tuple,
    "torch.device": lambda *parts: ":".join(map(str, parts)),
    "numpy.dtype": lambda code, *_: NumpyType(code),
    **dict.fromkeys(("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"), _numpy_scalar),
    **dict.fromkeys(("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"), NumpyArray),
}
# Classes that pickles name as arguments only.
_NAMES = ("numpy.ndarray", "builtins.int", "builtins.float", "builtins.list", "builtins.dict", "builtins.str")
_OBJECTS = ("argparse.Namespace", "types.SimpleNamespace")
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class SafeUnpickler(pickle.Unpickler):
    """Builds plain values from a pickle; whatever else it asks for is an error, before anything ran."""

    def __init__(
        self,
        file: IO[bytes],
        place: str,
        functions: Mapping[str, Callable[..., Any]],
        classes: tuple[str, ...] = (),
        persistent: Callable[[Any], Any] | None = None,
    ) -> None:
        """place: the file, for errors. functions: further ones it may call. classes: whose objects become `Pickled`."""
        super().__init__(file)
        self._place = place
        self._functions = {**_FUNCTIONS, **functions}
        self._classes = {*_OBJECTS, *classes}
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> Any:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full in self._functions:
            return Function(self._functions[full])
        if full in self._classes:
            return Pickled
        if full in _DTYPES:
            return _DTYPES[full]
        if full in _NAMES:
            return full
        raise CheckpointError(
            f"the file asks for {full}, which reading a checkpoint does not need; nothing was executed",
            where=self._place,
            hint="use a file that you trust, saved without objects of that class (see client_state)",
        )

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("a reference to another part of the file")
        return self._persistent(pid)


def unpickle(unpickler: SafeUnpickler, place: str) -> Any:
    """Return the plain value of a pickle.

    Raises: CheckpointError for a pickle that is damaged or asks for more than it may.
    """
    try:
        return unpickler.load()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the file's pickle cannot be read: {type(error).__name__}: {error}",
            where=place,
            hint="the file is damaged; use another checkpoint",
        ) from error
