"""`launch` inside a notebook: one process as a job of its own, functions on ranks, and the magics of IPython.

    launcher.notebook.emulate()                 this process is rank 0 of 1
    launcher.notebook.run(fn, num_gpus=2)       fn on two ranks, its results by rank
    %load_ext launcher.notebook                 %launch SCRIPT and %%launch

Importing this module loads neither torch nor IPython; the parts are loaded when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol

_LAZY_NAMES = {
    "Emulation": "launcher.notebook.emulation",
    "JobError": "launcher.base.errors",
    "emulate": "launcher.notebook.emulation",
    "run": "launcher.notebook.cells",
}

__all__ = ["Emulation", "JobError", "emulate", "load_ipython_extension", "run"]

if TYPE_CHECKING:
    from launcher.base.errors import JobError
    from launcher.notebook.cells import run
    from launcher.notebook.emulation import Emulation, emulate


class _Shell(Protocol):
    """What is used of IPython's `InteractiveShell`."""

    def register_magic_function(self, func: Any, magic_kind: str, magic_name: str) -> None: ...


def load_ipython_extension(ipython: _Shell) -> None:
    """Register `%launch` and `%%launch`; what `%load_ext launcher.notebook` calls."""
    from launcher.notebook.cells import launch

    ipython.register_magic_function(launch, "line_cell", "launch")


def __getattr__(name: str) -> Any:
    module_name = _LAZY_NAMES.get(name)
    if module_name is None:
        raise AttributeError(f"module 'launcher.notebook' has no attribute {name!r}")
    value = getattr(importlib.import_module(module_name), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LAZY_NAMES))
