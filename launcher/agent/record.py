"""Read the error record a rank has left. Its path stands in the rank's environment: anything may be found there."""

from __future__ import annotations

import json
import math
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAX_BYTES = 4 << 20
_TEXTS = ("type", "message", "traceback")


def read_record(path: str) -> dict[str, Any] | None:
    """Return the record of a worker; None when none was left, or something that no worker wrote."""
    try:
        # Not to wait for a writer, should a pipe stand there.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            record = json.loads(file.read(_MAX_BYTES) or b"")
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and is_sound(record) else None


def is_sound(record: dict[str, Any]) -> bool:
    """Tell whether what the controller computes with is there and of the right type."""
    time_s, exit_code = record.get("time_s"), record.get("exit_code")
    return (
        isinstance(time_s, float)
        and math.isfinite(time_s)
        and isinstance(exit_code, int)
        and 0 < exit_code < 256
        and all(isinstance(record.get(name), str) for name in _TEXTS)
    )
