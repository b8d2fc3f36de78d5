"""Load paramiko without what is never used of it.

paramiko imports `invoke`, and with it asyncio, unittest and a YAML reader, for the one purpose of running `Match exec`
of an SSH config: a third of its time to load. It can do without, and its reader of configurations is not used.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from types import ModuleType

from launcher.base.units import printable

_lock = threading.Lock()


def load() -> ModuleType:
    """Return paramiko; afterwards `import paramiko` costs nothing. Safe from several threads."""
    with _lock:
        if "paramiko" not in sys.modules:
            hides = "invoke" not in sys.modules
            if hides:
                sys.modules["invoke"] = None  # type: ignore[assignment]  # makes importing it an ImportError
            try:
                importlib.import_module("paramiko")
            finally:
                if hides:
                    del sys.modules["invoke"]
        logger = logging.getLogger("paramiko")  # also where a script has imported it before
        if not logger.handlers:
            # Without a handler logging's last resort prints paramiko's own tracebacks to the user's terminal.
            logger.addHandler(logging.NullHandler())
        return sys.modules["paramiko"]


class _Printable(logging.Formatter):
    """Spells out what a server says, such as its banner."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr(name: str = "paramiko") -> None:
    """Show what this logger is told, for this process, on standard error."""
    logger = logging.getLogger(name)
    with _lock:
        if not any(type(handler) is logging.StreamHandler for handler in logger.handlers):
            handler = logging.StreamHandler()
            handler.setFormatter(_Printable("%(asctime)s ssh: %(message)s", "%H:%M:%S"))
            logger.addHandler(handler)
            logger.setLevel(logging.DEBUG)


def failures() -> tuple[type[Exception], ...]:
    """Return what paramiko raises when a connection fails."""
    load()
    from paramiko import SSHException

    return (SSHException, OSError, EOFError)


def cause_of(error: BaseException | None) -> str:
    """Return what an error of paramiko says; its text is empty where the other side has hung up."""
    return str(error or "") or "the connection was closed"
