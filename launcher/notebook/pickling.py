"""Functions and results on their way between a notebook and its ranks.

Plain pickle names a function and expects the other process to import it, which no process can do with what was
defined in a notebook. cloudpickle sends such functions and classes whole.
"""

from __future__ import annotations

import importlib
import io
import pickle
from types import FunctionType
from typing import Any

from launcher.base.errors import UsageError

_LIBRARIES = ("launcher", "pickle", "_pickle", "cloudpickle", "copyreg")
_INSTALL = "install cloudpickle (pip install 'launch-zero[notebook]'), or define it in a module and import that"


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
                f"{obj.__qualname__} is defined in the notebook: no other process can import it", hint=_INSTALL
            )
        return NotImplemented
