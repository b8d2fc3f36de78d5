"""What to say of a value that cannot be saved, and what reading a damaged one raises."""

from __future__ import annotations

import dataclasses
import enum
import pickle
import struct
from typing import Any

from torch import Tensor

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
