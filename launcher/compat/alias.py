"""Makes the modules of the package `deepspeed` from the table of `launcher.compat.names`.

What is behind a name is imported when it is first read: `import deepspeed` imports neither torch nor the engine.
"""

from __future__ import annotations

import functools
import importlib
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from launcher.compat import names

_UNKNOWN = "it is the built-in engine of launch, whose docs/coming_from_deepspeed.md lists what there is"


def spec_of(name: str) -> ModuleSpec | None:
    """Return the spec of a module of the package, None for one that is neither in the table nor refused.

    The import of one that is refused ends in a sentence that says what there is instead.
    """
    path = name.partition(".")[2]
    loader = _TableLoader() if path in names.NAMES else _Refusal(names.REFUSED[path]) if path in names.REFUSED else None
    if loader is None:
        return None
    # Each is a package, so that `from module import name` asks here for a name that the module does not have.
    spec = ModuleSpec(name, loader, origin=names.__file__, is_package=True)
    spec.has_location = True
    return spec


@functools.cache
def targets_of(path: str) -> dict[str, tuple[str, str]]:
    """Return the names of a module below `deepspeed`: name -> (module that defines it, name there)."""
    targets = {}
    for source, words in names.NAMES[path].items():
        for word in _constants_of(source) if words == names.CONSTANTS else words.split():
            name, _, defined = word.partition("=")
            targets[name] = source, defined or name
    return targets


def _constants_of(source: str) -> list[str]:
    return [name for name in vars(importlib.import_module(source)) if name.isupper()]


def _children_of(path: str) -> list[str]:
    """Return the names of the modules that are directly inside of one."""
    prefix = f"{path}." if path else ""
    inside = (name.removeprefix(prefix) for name in names.NAMES if name and name.startswith(prefix))
    return [name for name in inside if "." not in name]


class _TableLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system."""

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its names."""
        fill(module)


def fill(module: ModuleType) -> None:
    """Give an empty module of the package the names of the table; nothing behind them is imported."""
    path = module.__name__.partition(".")[2]
    module.__doc__ = f"`{module.__name__}`, answered by the built-in engine of launch."
    exported = sorted({*targets_of(path), *_children_of(path)})
    module.__dict__.update(
        __all__=[name for name in exported if not name.startswith("__")],
        __getattr__=functools.partial(_read, module, path),
        __dir__=lambda: sorted({*module.__dict__, *exported}),
    )


def _read(module: ModuleType, path: str, name: str) -> Any:
    """Return what is behind a name of a module, and keep it there. Raises: AttributeError."""
    if name in _children_of(path):
        return importlib.import_module(f"{module.__name__}.{name}")
    if name not in targets_of(path):
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}: {_sentence(path, name)}")
    source, defined = targets_of(path)[name]
    value: Any = importlib.import_module(source)
    for word in defined.split("."):
        value = getattr(value, word)
    module.__dict__[name] = value
    return value


def _sentence(path: str, name: str) -> str:
    said = names.REFUSED.get(f"{path}.{name}".lstrip("."))
    return f"the built-in engine has {said}" if said else _UNKNOWN


class _Refusal(Loader):
    def __init__(self, sentence: str) -> None:
        self._sentence = sentence

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system."""

    def exec_module(self, module: ModuleType) -> NoReturn:
        """Refuse. Raises: ImportError."""
        raise ImportError(f"the built-in engine has {self._sentence}, or install DeepSpeed", name=module.__name__)
