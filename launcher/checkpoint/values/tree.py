"""Python values as JSON and tensors, and back: what a checkpoint keeps beside the model, without pickle.

JSON's own types stand for themselves. Any other value is an object of two keys, `{"$": kind, "of": payload}`. Elements
of tensors and arrays, and long byte strings, are tensors beside the JSON, which names them by key. A reader runs
no code, and allocates no more than the JSON and the tensors it was given take. Where both sides ask for it
(`checkpoint.pickle_client_state`), anything else is a pickle: it runs code when it is read.
"""

from __future__ import annotations

import argparse
import base64
import collections
import ctypes
import dataclasses
import datetime
import enum
import math
import pathlib
import pickle
import re
import reprlib
import struct
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import CheckpointError
from launcher.checkpoint.zero_to_fp32 import TORCH_DTYPES

# ---- What to say of a value that cannot be saved, and what reading a damaged one raises ----


# What reading damaged or hostile data may raise, whatever reads it.
DAMAGE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
    struct.error,
)


def name_of(value: Any) -> str:
    """Return "an argparse.Namespace": the type of a value with its article."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def advice(value: Any) -> str:
    """Return what could be saved in place of a value."""
    if isinstance(value, Tensor):
        return "save a plain one, such as value.to_dense(), value.dequantize() or value.full_tensor()"
    if isinstance(value, enum.Enum):
        return "save its .name or .value"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "save dataclasses.asdict(value)"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "save value._asdict(), or tuple(value)"
    for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset):
        if isinstance(value, kind):
            return f"save {kind.__name__}(value)"
    if isinstance(value, (bytearray, memoryview)):
        return "save bytes(value)"
    if callable(getattr(value, "state_dict", None)):
        return "save value.state_dict()"
    if callable(value):
        return "checkpoints hold no code: save a name, and find the function by it when you load"
    if hasattr(value, "__dict__"):
        return "save vars(value)"
    return "save numbers, text, lists, dicts and tensors"


KIND, PAYLOAD = "$", "of"


# ---- Tensors as bytes ----


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as torch prints it, without "torch."."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor, copied to the host where it is not there or not contiguous."""
    tensor = tensor.detach().cpu().contiguous()
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return memoryview(b"")
    memory = (ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # the view keeps the tensor alive
    return memoryview(memory).cast("B")


# ---- Values as JSON and tensors ----


MAX_DEPTH = 100  # of values in values; the JSON of each is up to three deep, and readers of JSON allow about 1000
_MAX_BYTES_IN_JSON = 256
_MAX_PLAIN_INT = 2**63 - 1  # larger ones are text: no reader of JSON rounds them, and none needs long to parse them
# Types that every safetensors reader knows. Tensors of others are kept as their bytes.
_COMMON_DTYPES = {TORCH_DTYPES[name] for name in ("BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64")}
_DTYPES = {dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_PATHS: dict[str, type[pathlib.PurePath]] = {
    "posix": pathlib.PosixPath,
    "pure posix": pathlib.PurePosixPath,
    "windows": pathlib.WindowsPath,
    "pure windows": pathlib.PureWindowsPath,
}
_PATH_KINDS = {path: kind for kind, path in _PATHS.items()}
# numpy's `dtype.str` of booleans, numbers, texts and times. Not objects, which are pickles; not structures.
_ARRAY_DTYPE = re.compile(
    r"[<>|](b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[SU]\d{1,9}|[mM]8(\[\d{0,9}[a-zA-Z]{1,7}\])?)", re.ASCII
)

_Path = tuple["_Path", str] | None  # innermost last; text is made of it for errors only


@dataclass(frozen=True)
class Pickled:
    """A pickled object of a checkpoint that was not unpickled, because the config does not ask for it.

    Pickled again, as into a file for DeepSpeed, it is the object itself: who unpickles that file unpickles it too.
    """

    content: bytes

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self.content,)

    def __deepcopy__(self, _: Any) -> Pickled:
        return self


def encode(value: Any, where: str, *, pickles: bool = False) -> tuple[Any, dict[str, Tensor]]:
    """Return `value` as what `json` writes, and the tensors it refers to by key.

    where: what the value is, such as "client_state"; errors begin with it, and so do the tensors' keys.
    The tensors are on the CPU, detached and contiguous. One that was so before shares its memory with the result.
    The JSON must keep the order of keys. A value that appears twice is written twice.
    pickles: pickle what is not plain data.
    Raises: CheckpointError for a value that is not plain data, which names its place in `value`.
    """
    encoder = _Encoder(where, pickles=pickles)
    return encoder.value(value, None, 0), encoder.tensors


def decode(
    plain: Any, tensors: Mapping[str, Tensor], where: str = "", unpickle: Callable[[bytes], Any] = Pickled
) -> Any:
    """Return the value that `encode` was given: equal, and of the same types.

    plain: as `json` read it. It may come from anyone.
    where: the file and what is read of it; errors begin with it.
    unpickle: called with each pickle.
    Raises: CheckpointError for anything that `encode` would not have written.
    """
    return _Decoder(tensors, where, unpickle).value(plain, None, 0)


def _text_of(path: _Path) -> str:
    parts: list[str] = []
    while path is not None:
        path, step = path
        parts.append(step)
    return "".join(reversed(parts))


def _step_of(key: Any) -> str:
    return f'["{key}"]' if isinstance(key, str) and key.isprintable() and len(key) < 60 else f"[{reprlib.repr(key)}]"


def _marked(kind: str, payload: Any) -> dict[str, Any]:
    return {KIND: kind, PAYLOAD: payload}


def _is_text(value: Any) -> bool:
    """Tell whether a value is a str that UTF-8 can hold: one without lone surrogates."""
    if type(value) is not str:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Encoder:
    """Encodes one tree."""

    def __init__(self, where: str, *, pickles: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._where = where
        self._pickles = pickles
        self._open: set[int] = set()  # ids of the containers around the value at hand

    def value(self, value: Any, path: _Path, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if (leaf := _LEAVES.get(kind)) is not None:
            return leaf(self, value)
        if (container := _CONTAINERS.get(kind)) is None:
            return self._other(value, path)
        if id(value) in self._open:
            raise self._refused("the value contains itself", path, "break the cycle before saving")
        if depth >= MAX_DEPTH:
            raise self._refused(f"values are nested deeper than {MAX_DEPTH} levels", path, "flatten them")
        self._open.add(id(value))
        try:
            return container(self, value, path, depth + 1)
        finally:
            self._open.discard(id(value))

    def text(self, value: str) -> Any:
        return value if _is_text(value) else _marked("str", _base64(value.encode("utf-8", "surrogatepass")))

    def integer(self, value: int) -> Any:
        return value if abs(value) <= _MAX_PLAIN_INT else _marked("int", hex(value))

    def number(self, value: float) -> Any:
        return value if math.isfinite(value) else _marked("float", struct.pack(">d", value).hex())

    def complex_number(self, value: complex) -> Any:
        return _marked("complex", struct.pack(">dd", value.real, value.imag).hex())

    def byte_string(self, value: bytes) -> Any:
        return _marked(
            "bytes", _base64(value) if len(value) <= _MAX_BYTES_IN_JSON else {"key": self._keep_bytes(value)}
        )

    def path_name(self, value: pathlib.PurePath) -> Any:
        return _marked("path", [_PATH_KINDS[type(value)], self.text(str(value))])

    def items(self, value: Iterable[Any], path: _Path, depth: int) -> list[Any]:
        return [self.value(item, (path, f"[{index}]"), depth) for index, item in enumerate(value)]

    def elements(self, value: Iterable[Any], path: _Path, depth: int) -> list[Any]:
        return [self.value(item, (path, ", an element"), depth) for item in value]

    def mapping(self, value: dict[Any, Any], path: _Path, depth: int) -> Any:
        if KIND not in value and all(map(_is_text, value)):
            return {key: self.value(item, (path, _step_of(key)), depth) for key, item in value.items()}
        return _marked("dict", self.pairs(value, path, depth))

    def pairs(self, value: Mapping[Any, Any], path: _Path, depth: int) -> list[Any]:
        return [
            [self.value(key, (path, ", a key"), depth), self.value(item, (path, _step_of(key)), depth)]
            for key, item in value.items()
        ]

    def _other(self, value: Any, path: _Path) -> Any:
        if type(value) in (Tensor, nn.Parameter):
            return self._tensor(value, path)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            return self._scalar(value, path)
        if numpy is not None and type(value) is numpy.ndarray:
            return self._array(value, path)
        if type(value) is datetime.datetime and type(value.tzinfo) in (type(None), datetime.timezone):
            return _marked("datetime", _parts_of(value))
        if self._pickles:
            return self._pickled(value, path)
        hint = f'{advice(value)}, or set "pickle_client_state" in "checkpoint" of the config'
        raise self._refused(f"{name_of(value)} cannot be saved", path, hint)

    def _pickled(self, value: Any, path: _Path) -> Any:
        try:
            content = pickle.dumps(value)
        except Exception as error:  # noqa: BLE001  # whatever the classes in it raise
            what = f"{name_of(value)} cannot be pickled: {type(error).__name__}: {error}"
            raise self._refused(what, path, advice(value)) from None
        return self.pickled(Pickled(content))

    def pickled(self, value: Pickled) -> Any:
        return _marked("pickle", {"key": self._keep_bytes(value.content)})

    def _tensor(self, value: Tensor, path: _Path) -> Any:
        if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.is_meta:
            what = "a tensor that is sparse, quantized, nested or on the meta device"
            raise self._refused(f"{what} cannot be saved", path, advice(value))
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if plain.dtype not in _COMMON_DTYPES:
            plain = plain.reshape(-1).view(torch.uint8)
        description = {"key": self._keep(plain), "dtype": dtype_name(value.dtype), "shape": list(value.shape)}
        return _marked("tensor", description)

    def _array(self, value: Any, path: _Path) -> Any:
        if not _ARRAY_DTYPE.fullmatch(value.dtype.str):
            hint = "save its columns, or lists"
            raise self._refused(f"a numpy array of dtype {value.dtype} cannot be saved", path, hint)
        key = self._keep_bytes(value.tobytes())
        return _marked("numpy.ndarray", {"key": key, "dtype": value.dtype.str, "shape": list(value.shape)})

    def _scalar(self, value: Any, path: _Path) -> Any:
        if value.dtype.kind == "U":  # its dtype may have a length of 0, which numpy makes no array of
            return _marked("numpy.str", self.text(str.__str__(value)))  # str() drops zeros at the end
        if value.dtype.kind == "S":
            return _marked("numpy.bytes", self.byte_string(bytes.__getitem__(value, slice(None))))
        if not _ARRAY_DTYPE.fullmatch(value.dtype.str):
            raise self._refused(f"{name_of(value)} cannot be saved", path, advice(value))
        return _marked("numpy.scalar", [value.dtype.str, value.tobytes().hex()])

    def _keep(self, tensor: Tensor) -> str:
        key = f"{self._where}/{len(self.tensors)}"
        self.tensors[key] = tensor
        return key

    def _keep_bytes(self, value: bytes) -> str:
        # A bytearray, as torch wants to be able to write to the memory.
        tensor = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8)
        return self._keep(tensor)

    def _refused(self, message: str, path: _Path, hint: str) -> CheckpointError:
        return CheckpointError(message, where=self._where + _text_of(path), hint=hint)


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _days_of(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _parts_of(value: datetime.datetime) -> list[Any]:
    day = [value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond]
    offset, name = value.utcoffset(), value.tzname()
    if offset is None:
        return [day, value.fold, None, None]
    is_named = name != datetime.timezone(offset).tzname(None)
    return [day, value.fold, _days_of(offset), name if is_named else None]


_LEAVES: dict[type, Callable[[_Encoder, Any], Any]] = {
    str: _Encoder.text,
    int: _Encoder.integer,
    float: _Encoder.number,
    complex: _Encoder.complex_number,
    bytes: _Encoder.byte_string,
    torch.Size: lambda _, value: _marked("torch.Size", list(value)),
    torch.dtype: lambda _, value: _marked("torch.dtype", dtype_name(value)),
    torch.device: lambda _, value: _marked("torch.device", str(value)),
    datetime.date: lambda _, value: _marked("date", [value.year, value.month, value.day]),
    datetime.timedelta: lambda _, value: _marked("timedelta", _days_of(value)),
    Pickled: _Encoder.pickled,
    **dict.fromkeys(_PATH_KINDS, _Encoder.path_name),
}
_CONTAINERS: dict[type, Callable[[_Encoder, Any, _Path, int], Any]] = {
    list: _Encoder.items,
    dict: _Encoder.mapping,
    tuple: lambda encoder, value, *place: _marked("tuple", encoder.items(value, *place)),
    set: lambda encoder, value, *place: _marked("set", encoder.elements(value, *place)),
    frozenset: lambda encoder, value, *place: _marked("frozenset", encoder.elements(value, *place)),
    collections.OrderedDict: lambda encoder, value, *place: _marked("OrderedDict", encoder.pairs(value, *place)),
    collections.Counter: lambda encoder, value, *place: _marked("Counter", encoder.pairs(value, *place)),
    argparse.Namespace: lambda encoder, value, *place: _marked("Namespace", encoder.pairs(vars(value), *place)),
    types.SimpleNamespace: lambda encoder, value, *place: _marked(
        "SimpleNamespace", encoder.pairs(vars(value), *place)
    ),
}


class _Decoder:
    """Decodes one tree."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str, unpickle: Callable[[bytes], Any]) -> None:
        self._tensors = tensors
        self._where = where
        self._unpickle = unpickle
        self._taken: set[str] = set()

    def value(self, plain: Any, path: _Path, depth: int) -> Any:
        kind = type(plain)
        if plain is None or kind in (bool, int, float, str):
            return plain
        if depth > MAX_DEPTH:
            raise self._damaged(f"values are nested deeper than {MAX_DEPTH} levels", path)
        if kind is list:
            return self._items(plain, path, depth)
        if kind is not dict:
            raise self._damaged(f"{name_of(plain)} is no JSON value", path)
        if KIND not in plain:
            return {key: self.value(item, (path, _step_of(key)), depth + 1) for key, item in plain.items()}
        return self._marked(plain, path, depth)

    def _marked(self, plain: dict[str, Any], path: _Path, depth: int) -> Any:
        kind = plain[KIND]
        if set(plain) != {KIND, PAYLOAD} or type(kind) is not str:
            raise self._damaged("a value's description has other fields than it should", path)
        payload = plain[PAYLOAD]
        try:
            if (leaf := _READERS.get(kind)) is not None:
                return leaf(self, payload)
            if (sequence := _SEQUENCES.get(kind)) is not None:
                return sequence(self._items(payload, path, depth))
            if (mapping := _MAPPINGS.get(kind)) is not None:
                return mapping(self._pairs(payload, path, depth))
        except DAMAGE as error:
            raise self._damaged(f"the value of kind {kind[:40]!r} is damaged ({error})", path) from None
        raise self._damaged(f"unknown type of value {kind[:40]!r}", path)

    def _items(self, plain: Any, path: _Path, depth: int) -> list[Any]:
        return [self.value(item, (path, f"[{index}]"), depth + 1) for index, item in enumerate(_listed(plain))]

    def _pairs(self, plain: Any, path: _Path, depth: int) -> dict[Any, Any]:
        pairs: dict[Any, Any] = {}
        for pair in _listed(plain):
            plain_key, plain_item = _listed(pair)
            key = self.value(plain_key, (path, ", a key"), depth + 1)
            pairs[key] = self.value(plain_item, (path, _step_of(key)), depth + 1)
        return pairs

    def text(self, plain: Any) -> str:
        """Return a str that is one in JSON, or described as one that UTF-8 cannot hold."""
        if type(plain) is dict and plain.get(KIND) == "str":
            plain = _bytes_of(plain[PAYLOAD]).decode("utf-8", "surrogatepass")
        text: str = _typed(plain, str)
        return text

    def byte_string(self, plain: Any) -> bytes:
        if type(plain) is dict:
            if plain.get(KIND) == "bytes":
                return self.byte_string(plain[PAYLOAD])
            return self._take_bytes(plain["key"])
        return _bytes_of(plain)

    def pickled(self, plain: Any) -> Any:
        return self._unpickle(self._take_bytes(plain["key"]))

    def tensor(self, plain: Any) -> Tensor:
        stored, dtype, shape = self._take(plain["key"]), _DTYPES[_typed(plain["dtype"], str)], _shape_of(plain["shape"])
        if dtype in _COMMON_DTYPES:
            if stored.dtype is not dtype or stored.shape != shape:
                raise ValueError(f"tensor {plain['key']} is of another type or shape")
            return stored
        return _viewed(stored, dtype, shape)

    def array(self, plain: Any) -> Any:
        dtype, shape = _array_dtype(plain["dtype"]), _shape_of(plain["shape"])
        raw = self._take_bytes(plain["key"])
        if math.prod(shape) * dtype.itemsize != len(raw):
            raise ValueError(f"tensor {plain['key']} is of another size")
        return _numpy().ndarray(shape, dtype, bytearray(raw))

    def scalar(self, plain: Any) -> Any:
        name, text = _listed(plain)
        dtype, raw = _array_dtype(name), bytes.fromhex(text)
        if dtype.itemsize != len(raw):
            raise ValueError("its size is another")
        return _numpy().ndarray((), dtype, raw)[()]

    def _take(self, key: Any) -> Tensor:
        """Return the tensor of a key. Once: a short text that names a large tensor often would need much memory."""
        if _typed(key, str) in self._taken:
            raise ValueError(f"tensor {key[:80]!r} is used twice")
        self._taken.add(key)
        if key not in self._tensors:
            raise ValueError(f"tensor {key[:80]!r} is missing")
        return self._tensors[key]

    def _take_bytes(self, key: Any) -> bytes:
        stored = self._take(key)
        if stored.dtype is not torch.uint8 or stored.dim() != 1:
            raise ValueError(f"tensor {key} is of another type or shape")
        return bytes(bytes_of(stored))

    def _damaged(self, message: str, path: _Path) -> CheckpointError:
        return CheckpointError(message, where=(self._where + _text_of(path)) or None, hint="load another checkpoint")


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{name_of(value)} in place of {kind.__name__}")
    return value


def _listed(value: Any) -> list[Any]:
    result: list[Any] = _typed(value, list)
    return result


def _numbers(value: Any) -> list[int]:
    return [_typed(number, int) for number in _listed(value)]


def _shape_of(value: Any) -> torch.Size:
    shape = _numbers(value)
    if any(size < 0 for size in shape):
        raise ValueError("a size is negative")
    return torch.Size(shape)


def _bytes_of(value: Any) -> bytes:
    return base64.b64decode(_typed(value, str), validate=True)


def _viewed(stored: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Return a tensor of a rarer type, whose bytes are `stored`. # 1D -> ND"""
    if stored.dtype is not torch.uint8 or stored.dim() != 1 or len(stored) != math.prod(shape) * dtype.itemsize:
        raise ValueError("its bytes are of another type or number")
    # A copy, as bytes may begin where numbers of the type may not.
    return stored.clone().view(dtype).reshape(shape)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise ValueError("numpy is not installed") from None
    return numpy


def _array_dtype(name: Any) -> Any:
    if not _ARRAY_DTYPE.fullmatch(_typed(name, str)):
        raise ValueError(f"there is no dtype {name[:40]!r}")
    return _numpy().dtype(name)


def _float_of(payload: Any) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(payload))
    return float(value)


def _datetime_of(payload: Any) -> datetime.datetime:
    day, fold, offset, name = _listed(payload)
    zone = None
    if offset is not None:
        delta = datetime.timedelta(*_numbers(offset))
        zone = datetime.timezone(delta) if name is None else datetime.timezone(delta, _typed(name, str))
    year, month, date, hour, minute, second, microsecond = _numbers(day)
    return datetime.datetime(year, month, date, hour, minute, second, microsecond, zone, fold=_typed(fold, int))


def _with_fields(value: Any, fields: dict[Any, Any]) -> Any:
    vars(value).update({_typed(name, str): field for name, field in fields.items()})
    return value


def _path_of(decoder: _Decoder, payload: Any) -> pathlib.PurePath:
    kind, text = _listed(payload)
    return _PATHS[_typed(kind, str)](decoder.text(text))


_READERS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "str": lambda _, payload: _bytes_of(payload).decode("utf-8", "surrogatepass"),
    "int": lambda _, payload: int(_typed(payload, str), 16),
    "float": lambda _, payload: _float_of(payload),
    "complex": lambda _, payload: complex(*struct.unpack(">dd", bytes.fromhex(payload))),
    "bytes": _Decoder.byte_string,
    "path": _path_of,
    "date": lambda _, payload: datetime.date(*_numbers(payload)),
    "datetime": lambda _, payload: _datetime_of(payload),
    "timedelta": lambda _, payload: datetime.timedelta(*_numbers(payload)),
    "torch.Size": lambda _, payload: torch.Size(_numbers(payload)),
    "torch.dtype": lambda _, payload: _DTYPES[_typed(payload, str)],
    "torch.device": lambda _, payload: torch.device(_typed(payload, str)),
    "pickle": _Decoder.pickled,
    "tensor": _Decoder.tensor,
    "numpy.ndarray": _Decoder.array,
    "numpy.scalar": _Decoder.scalar,
    "numpy.str": lambda decoder, payload: _numpy().str_(decoder.text(payload)),
    "numpy.bytes": lambda decoder, payload: _numpy().bytes_(decoder.byte_string(payload)),
}
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
    "Namespace": lambda fields: _with_fields(argparse.Namespace(), fields),
    "SimpleNamespace": lambda fields: _with_fields(types.SimpleNamespace(), fields),
}
