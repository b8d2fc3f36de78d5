"""Calls and what they come to, on their way between a program and its ranks.

Plain pickle names a function and expects the other process to import it, which no process can do with what was
defined in a notebook or in the program's own file. cloudpickle sends such functions and classes whole.

What a rank sends back is one byte, RETURNED or RAISED, the length of the rest in eight bytes, and a pickle. Whoever
unpickles runs code of whoever has pickled: only what the caller's own ranks sent is unpickled.
"""

from __future__ import annotations

import importlib
import io
import linecache
import os
import pickle
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from launcher.base.errors import UsageError
from launcher.base.units import format_bytes

MAX_PICKLE_BYTES = 1 << 30  # of a call, and of what one rank sends back: all of it is held in memory on its way
RETURNED, RAISED = b"R", b"E"
_HEADER = struct.Struct(">cQ")
MAX_ANSWER_BYTES = _HEADER.size + MAX_PICKLE_BYTES
_LIBRARIES = ("launcher", "pickle", "_pickle", "cloudpickle", "copyreg")
_INSTALL = "install cloudpickle (pip install 'launch-zero[notebook]'), or define it in a module and import that"
_USE_A_FILE = "keep large data in a file that the ranks read or write, and send its path"


def pack_call(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Return what `launcher.api.rank` reads: where to import from and sources without a file, then the call.

    Raises: UsageError when it cannot be pickled.
    """
    interpreter = (sys.prefix, sys.version_info[:2])
    search_path = [os.path.abspath(folder) for folder in sys.path]
    # Cells have no file. With their sources the ranks' tracebacks show lines, and inspect.getsource works there.
    sources = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    what = "the function or its arguments"
    call = dumps((function, tuple(args), dict(kwargs)), what)
    return _small(pickle.dumps((interpreter, search_path, sources)) + call, what)


def pack_answer(kind: bytes, value: Any, what: str) -> bytes:
    """Return what a rank sends back. kind: RETURNED or RAISED. Raises: UsageError when it cannot be sent."""
    data = _small(dumps(value, what), what)
    return _HEADER.pack(kind, len(data)) + data


def unpack_answer(data: bytes) -> tuple[bytes, bytes] | None:
    """Return kind and pickle of what a rank has sent, None when that is not whole."""
    if len(data) < _HEADER.size:
        return None
    kind, num_bytes = _HEADER.unpack_from(data)
    return (kind, data[_HEADER.size :]) if len(data) == _HEADER.size + num_bytes else None


def _small(data: bytes, what: str) -> bytes:
    if len(data) > MAX_PICKLE_BYTES:
        size, most = format_bytes(len(data)), format_bytes(MAX_PICKLE_BYTES)
        raise UsageError(f"{what} takes {size} when pickled, and at most {most} can be sent", hint=_USE_A_FILE)
    return data


def dumps(value: Any, what: str) -> bytes:
    """Return `value` pickled, by cloudpickle where it is installed. `what` names it in the error.

    Raises: UsageError when it cannot be pickled.
    """
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        return _dumps_importable(value, what)
    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001  # the __reduce__ of a user may raise anything
        raise UsageError(
            f"{what} cannot be pickled: {error}",
            hint="send plain data and open files, locks and connections inside the function",
        ) from _by_user(error)
    return data


def _dumps_importable(value: Any, what: str) -> bytes:
    buffer = io.BytesIO()
    try:
        _ImportablePickler(buffer).dump(value)
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001  # the __reduce__ of a user may raise anything
        raise UsageError(f"{what} cannot be pickled: {error}", hint=_INSTALL) from _by_user(error)
    return buffer.getvalue()


def _by_user(error: Exception) -> Exception | None:
    """Return the error with the frames of the user's code, such as a `__reduce__`; None when none took part."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        trace = trace.tb_next
    return None if trace is None else error.with_traceback(trace)


class _ImportablePickler(pickle.Pickler):
    """Refuses what pickle would write and no other process could read."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and obj.__module__ == "__main__":
            raise UsageError(
                f"{obj.__qualname__} is defined in the notebook or the program itself: no other process can import it",
                hint=_INSTALL,
            )
        return NotImplemented
