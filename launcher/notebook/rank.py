"""What a rank of `launcher.notebook.run` runs; its argument is FOLDER. Started by the worker.

FOLDER holds the call; the rank leaves `result_RANK` or `error_RANK` in it.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import pickle
import sys

from launcher.base import env
from launcher.base.errors import UsageError
from launcher.notebook.pickling import dumps

CALL_FILE = "call"
RESULT_FILE = "result_{}"
ERROR_FILE = "error_{}"


def main(folder: str) -> None:
    """Run the call in `folder` as this rank. What the function raises reaches the worker, which reports it."""
    rank = os.environ[env.RANK.name]
    with open(os.path.join(folder, CALL_FILE), "rb") as file:
        search_path, sources = pickle.load(file)
        sys.path[:] = search_path
        linecache.cache.update(sources)
        fn, args, kwargs = pickle.load(file)
    try:
        result = fn(*args, **kwargs)
    except Exception as error:
        with contextlib.suppress(UsageError, OSError):  # without it the traceback, which is text, has to do
            _save(os.path.join(folder, ERROR_FILE.format(rank)), dumps(error, "the error"))
        raise
    _save(os.path.join(folder, RESULT_FILE.format(rank)), dumps(result, f"the result, a {type(result).__name__},"))


def _save(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


if __name__ == "__main__":
    main(sys.argv[1])
