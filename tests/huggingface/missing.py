"""What transformers and accelerate ask deepspeed and the engine for, and do not get."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

_ASKING = ("transformers", "accelerate")  # whose calls count
_BETWEEN = (__name__.split(".")[0], "importlib")  # these hand on what another asked for


def _asker() -> str | None:
    """Return "package: function" of the frame that asks; None where it is not one of those that count."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).split(".")[0]
        if package not in _BETWEEN:
            return f"{package}: {frame.f_code.co_name}" if package in _ASKING else None
        frame = frame.f_back
    return None


class _Submodules:
    """The last finder: who comes here asks for a module that is not there."""

    def __init__(self, missing: set[str]) -> None:
        self._missing = missing

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.startswith("deepspeed.") and (asker := _asker()):
            self._missing.add(f"module {name} ({asker})")


@contextlib.contextmanager
def noted() -> Iterator[set[str]]:
    """Return a set that every name is added to that was asked for in vain: "where.name (package: function)"."""
    import deepspeed

    from launcher.engine.engine import Engine
    from launcher.engine.optimizer import ZeroOptimizer
    from launcher.optim.schedules import LRSchedule

    missing: set[str] = set()
    finder = _Submodules(missing)

    def asks_in_vain(where: str, name: str) -> None:
        if not name.startswith("__") and (asker := _asker()) is not None:
            missing.add(f"{where}.{name} ({asker})")

    with contextlib.ExitStack() as stack:
        for module in [deepspeed, *_submodules_of("deepspeed")]:
            stack.callback(_watch_module(module, asks_in_vain))
        for watched in (Engine, ZeroOptimizer, LRSchedule):
            stack.callback(_watch_class(watched, asks_in_vain))
        sys.meta_path.append(finder)  # type: ignore[arg-type]  # a finder that finds nothing
        stack.callback(sys.meta_path.remove, finder)
        yield missing


def _submodules_of(package: str) -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]


def _watch_module(module: ModuleType, asks_in_vain: Any) -> Any:
    before = vars(module).get("__getattr__")

    def __getattr__(name: str) -> Any:
        asks_in_vain(module.__name__, name)
        if before is not None:
            return before(name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__getattr__ = __getattr__  # type: ignore[method-assign]

    def undo() -> None:
        if before is None:
            del module.__getattr__
        else:
            module.__getattr__ = before  # type: ignore[method-assign]

    return undo


def _watch_class(kind: type, asks_in_vain: Any) -> Any:
    before = getattr(kind, "__getattr__", None)

    def __getattr__(self: Any, name: str) -> Any:
        try:
            if before is not None:
                return before(self, name)
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}", name=name)
        except AttributeError:
            asks_in_vain(kind.__name__, name)
            raise

    had_own = "__getattr__" in vars(kind)
    kind.__getattr__ = __getattr__  # type: ignore[attr-defined]

    def undo() -> None:
        if had_own:
            kind.__getattr__ = before  # type: ignore[attr-defined]
        else:
            del kind.__getattr__  # type: ignore[attr-defined]

    return undo
