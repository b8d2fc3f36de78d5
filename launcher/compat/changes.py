"""Changes modules of other libraries as they are imported: those in `_CHANGED` of the package, and no others.

And has the panel of `launch` show which modules are being imported, which changes nothing of them.
"""

from __future__ import annotations

import importlib
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from launcher.base.progress import phase


def changed_spec(name: str, path: Any, changer: str) -> ModuleSpec | None:
    """Return the spec of a module that is on its package's `path`, with a loader that has it changed.

    changer: the module whose function `change` takes the module that has been loaded.
    """
    spec = PathFinder.find_spec(name, path)
    if spec is not None and isinstance(spec.loader, SourceFileLoader):
        spec.loader = _ChangingLoader(spec.loader, changer)
    return spec


class _ChangingLoader(SourceFileLoader):
    def __init__(self, loader: SourceFileLoader, changer: str) -> None:
        super().__init__(loader.name, loader.path)
        self._changer = changer

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        importlib.import_module(self._changer).change(module)


def shown_spec(spec: ModuleSpec | None) -> ModuleSpec | None:
    """Return the spec of a module with a loader that shows its import on the panel of `launch`."""
    if spec is not None and isinstance(spec.loader, SourceFileLoader):
        spec.loader = _ShowingLoader(spec.loader.name, spec.loader.path)
    return spec


class _ShowingLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        with phase(f"importing {self.name}"):
            super().exec_module(module)
