"""Import timm where torchvision is not installed: its models need one class of it, its image transforms the rest."""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_NAME = "torchvision"


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of torchvision, whose classes are empty."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != _NAME:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: Any = ModuleType(spec.name)
        module.InterpolationMode = enum.Enum("InterpolationMode", "NEAREST BILINEAR BICUBIC BOX HAMMING LANCZOS")
        module.__getattr__ = _empty_class
        return module  # type: ignore[no-any-return]  # it is a module with attributes

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: the stand-in is built in `create_module`."""


def _empty_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def import_timm() -> Any:
    """Return timm. Raises: ImportError."""
    is_absent = importlib.util.find_spec(_NAME) is None
    finder = _Absent()
    if is_absent:
        sys.meta_path.append(finder)
    try:
        import timm
    finally:
        if is_absent:  # other libraries shall see that there is none
            sys.meta_path.remove(finder)
            for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
                del sys.modules[name]
    return timm
