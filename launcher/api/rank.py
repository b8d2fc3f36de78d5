"""What a rank of `launcher.run` does with a function: read the call, make it, send back what it came to.

Started by the worker. The agent has put the call and a pipe for the answer into two descriptors.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import pickle
import sys

from launcher.api.pickling import RAISED, RETURNED, pack_answer
from launcher.base import env
from launcher.base.errors import UsageError


def main() -> None:
    """Make the call as this rank. What the function raises reaches the worker, which reports it."""
    call_fd, result_fd = (int(os.environ.pop(variable.name)) for variable in (env.CALL_FD, env.RESULT_FD))
    os.set_inheritable(result_fd, False)  # a program that the function starts must not hold it open
    # Opened anew: the descriptor's own offset is that of all ranks of the node.
    with open(f"/proc/self/fd/{call_fd}", "rb") as file:
        os.close(call_fd)
        interpreter, search_path, sources = pickle.load(file)
        _import_as(interpreter, search_path)
        linecache.cache.update(sources)
        function, args, kwargs = pickle.load(file)
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        with contextlib.suppress(UsageError, OSError):  # without it the traceback, which is text, has to do
            _send(result_fd, pack_answer(RAISED, error, "the error"))
        raise
    try:
        answer = pack_answer(RETURNED, result, f"the result, a {type(result).__name__},")
    except UsageError as error:
        raise error.with_traceback(None)  # noqa: B904  # shown without our frames; its cause is the user's own error
    _send(result_fd, answer)


def _import_as(interpreter: object, search_path: list[str]) -> None:
    """Import from where the caller does: in the same order if this is the same Python, else after its own places."""
    if interpreter == (sys.prefix, sys.version_info[:2]):
        sys.path[:] = search_path
    else:
        sys.path += [folder for folder in search_path if folder not in sys.path]


def _send(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb") as file:
        file.write(data)


if __name__ == "__main__":
    main()
