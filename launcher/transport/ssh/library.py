"""Load paramiko, which costs a third of a short command's time, in two parts and without what is never used of it.

The reader of SSH configs comes first and alone: it is small, and with it the TCP connections can be made, so that the
servers begin their side while the rest is loaded. paramiko also imports `invoke` (and with it asyncio, unittest and a
YAML reader: 45 of 120 ms) for the one purpose of running `Match exec` of an SSH config. It can do without, and says so
when such a line is met; `with_exec` gives it back.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

_lock = threading.Lock()


def load() -> None:
    """Import paramiko; afterwards `import paramiko` costs nothing. Safe from several threads."""
    with _lock:
        if "paramiko" not in sys.modules:
            with _without_invoke():
                importlib.import_module("paramiko")
        logger = logging.getLogger("paramiko")  # also where a script has imported it before
        if not logger.handlers:
            # Without a handler logging's last resort prints paramiko's own tracebacks to the user's terminal.
            logger.addHandler(logging.NullHandler())


def log_to_stderr() -> None:
    """Show what the library does, for this process, on standard error."""
    logger = logging.getLogger("paramiko")
    with _lock:
        if not any(type(handler) is logging.StreamHandler for handler in logger.handlers):
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s ssh: %(message)s", "%H:%M:%S"))
            logger.addHandler(handler)
            logger.setLevel(logging.DEBUG)


def config_reader() -> ModuleType:
    """Return `paramiko.config`, loaded without the rest of paramiko where that is possible."""
    with _lock:
        if "paramiko.config" not in sys.modules and "paramiko" not in sys.modules:
            _load_reader_alone()
    if "paramiko.config" not in sys.modules:
        load()
    return sys.modules["paramiko.config"]


def failures() -> tuple[type[Exception], ...]:
    """Return what paramiko raises when a connection fails."""
    load()
    from paramiko import SSHException

    return (SSHException, OSError, EOFError)


def with_exec() -> None:
    """Let paramiko run the programs of `Match exec`, where `invoke` is installed."""
    config = config_reader()
    if getattr(config, "invoke", None) is None:
        # Where it is not installed, paramiko names what is missing when it meets the line.
        with contextlib.suppress(ImportError):
            config.invoke = importlib.import_module("invoke")  # type: ignore[attr-defined]


def _load_reader_alone() -> None:
    """Import `paramiko.config` under a package that is only a path; paramiko itself takes it over when it is loaded."""
    spec = importlib.util.find_spec("paramiko")
    if spec is None:
        return
    before = set(sys.modules)
    sys.modules["paramiko"] = importlib.util.module_from_spec(spec)
    try:
        with _without_invoke():
            importlib.import_module("paramiko.config")
    except ImportError:  # a version whose reader needs the rest
        for name in [name for name in sys.modules if name.startswith("paramiko.") and name not in before]:
            del sys.modules[name]
    finally:
        del sys.modules["paramiko"]


@contextlib.contextmanager
def _without_invoke() -> Iterator[None]:
    hides = "invoke" not in sys.modules
    if hides:
        sys.modules["invoke"] = None  # type: ignore[assignment]  # makes importing it an ImportError
    try:
        yield
    finally:
        if hides:
            del sys.modules["invoke"]
