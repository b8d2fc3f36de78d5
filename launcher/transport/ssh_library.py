"""Load paramiko, which costs a third of a short command's time, without what this package never uses of it.

paramiko imports `invoke` (and with it asyncio, unittest and a YAML reader: 45 of 120 ms) for the one purpose of running
`Match exec` of an SSH config. It can do without, and says so when such a line is met; `with_exec` gives it back.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading

_lock = threading.Lock()


def load() -> None:
    """Import paramiko; afterwards `import paramiko` costs nothing. Safe from several threads."""
    with _lock:
        if "paramiko" in sys.modules:
            return
        hides_invoke = "invoke" not in sys.modules
        if hides_invoke:
            sys.modules["invoke"] = None  # type: ignore[assignment]  # makes importing it an ImportError
        try:
            importlib.import_module("paramiko")
        finally:
            if hides_invoke:
                del sys.modules["invoke"]
        # Without a handler logging's last resort prints paramiko's own tracebacks to the user's terminal.
        logging.getLogger("paramiko").addHandler(logging.NullHandler())


def with_exec() -> None:
    """Let paramiko run the programs of `Match exec`, where `invoke` is installed."""
    load()
    config = importlib.import_module("paramiko.config")
    if getattr(config, "invoke", None) is None:
        try:
            config.invoke = importlib.import_module("invoke")  # type: ignore[attr-defined]
        except ImportError:  # paramiko names what is missing when it meets the line
            return
        config.invoke_import_error = None  # type: ignore[attr-defined]
