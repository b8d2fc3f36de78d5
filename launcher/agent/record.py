"""Read what a rank has left: its error record, its stacks.

The paths stand in the rank's environment: anything may be found there.
"""

from __future__ import annotations

import json
import math
import os

from launcher.transport.command import package_root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MAX_BYTES = 4 << 20  # of a file
_LIBRARY = os.path.dirname(os.__file__)
_OWN_FILES = ("start.py", "worker.py", os.path.join("api", "rank.py"))
_TEXTS = ("type", "message", "traceback")


def read_record(path: str) -> dict[str, Any] | None:
    """Return the record of a worker; None when none was left, or something that no worker wrote."""
    record = read_object(path)
    return record if record is not None and is_sound(record) else None


def read_object(path: str) -> dict[str, Any] | None:
    """Return the JSON object in a file, such as torch's `@record` leaves; None where there is none."""
    try:
        # Not to wait for a writer, should a pipe stand there.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = json.loads(file.read(_MAX_BYTES) or b"")
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_sound(record: dict[str, Any]) -> bool:
    """Return whether what the controller computes with is there and of the right type."""
    time_s, exit_code = record.get("time_s"), record.get("exit_code")
    return (
        isinstance(time_s, float)
        and math.isfinite(time_s)
        and isinstance(exit_code, int)
        and 0 < exit_code < 256
        and all(isinstance(record.get(name), str) for name in _TEXTS)
    )


def without_own_frames(text: str) -> str:
    """Return the stacks that faulthandler has written without the frames that have led to the user's code.

    They are the last of each thread: our own, and those of runpy between them and a module or folder.
    """
    own = [os.path.join(package_root(), "launcher", name) for name in _OWN_FILES]
    starts = tuple(f'  File "{path}"' for path in (*own, "<frozen runpy>", os.path.join(_LIBRARY, "runpy.py")))
    kept: list[str] = []
    for line in reversed(text.splitlines(keepends=True)):
        is_last = not kept or not kept[-1].startswith("  File ")
        if not (is_last and line.startswith(starts)):
            kept.append(line)
    return "".join(reversed(kept))
