"""What is said about modules before an engine is built: gathered as one, a tile, or read by another module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from launcher.base.errors import EngineRuntimeError, EngineValueError
from launcher.zero.marks import Mark

_LEAF_MARK = "_z3_leaf"  # the name that scripts written for DeepSpeed read
_IS_TILE: Mark[bool] = Mark("is_tile")
_EXTERNAL: Mark[list[nn.Parameter]] = Mark("external_parameters")


def set_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Iterable[type[nn.Module] | str] | type[nn.Module] | str,
    raise_if_not_found: bool = True,
) -> list[nn.Module]:
    """Have modules gathered as one, with everything inside, when their forward begins. Call it before `initialize`.

    leaf_module_classes: classes, or their names; one may stand alone. For modules whose parts run in an order that
    differs between ranks, such as mixtures of experts. Returns the modules found.

    Raises: EngineValueError when there are none.
    """
    found = _find(model, leaf_module_classes, raise_if_not_found=raise_if_not_found)
    for module in found:
        set_z3_leaf_module(module, True)
    return found


def unset_z3_leaf_modules(
    model: nn.Module,
    leaf_module_classes: Iterable[type[nn.Module] | str] | type[nn.Module] | str,
    raise_if_not_found: bool = False,
) -> list[nn.Module]:
    """Undo `set_z3_leaf_modules` for modules of the given classes, or of classes of these names; return them.

    Raises: EngineValueError when there are none, with `raise_if_not_found`.
    """
    found = _find(model, leaf_module_classes, raise_if_not_found=raise_if_not_found)
    for module in found:
        set_z3_leaf_module(module, False)
    return found


def _find(
    model: nn.Module, kinds: Iterable[type[nn.Module] | str] | type[nn.Module] | str, *, raise_if_not_found: bool
) -> list[nn.Module]:
    """Return the modules of any of these classes; names may be paths. Raises: as above."""
    kinds = [kinds] if isinstance(kinds, str | type) else list(kinds)
    classes = tuple(kind for kind in kinds if isinstance(kind, type))
    names = {kind for kind in kinds if isinstance(kind, str)}
    found = [
        module
        for module in model.modules()
        if isinstance(module, classes) or type(module).__name__ in names or _path(type(module)) in names
    ]
    if not found and raise_if_not_found:
        wanted = ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in kinds)
        raise EngineValueError(
            f"the model has no module of class {wanted}", hint="give the class of one of its modules"
        )
    return found


def set_z3_leaf_module(module: nn.Module, is_leaf: bool) -> None:
    """Mark one module as gathered as one, or not."""
    setattr(module, _LEAF_MARK, is_leaf)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules marked as gathered as one."""
    return [module for module in model.modules() if is_leaf(module)]


def is_leaf(module: nn.Module) -> bool:
    """Whether a module is marked as gathered as one."""
    return bool(module.__dict__.get(_LEAF_MARK, False))


z3_leaf_module = is_leaf


def set_tile(module: nn.Module) -> None:
    """Mark a module as a tile: gathered by itself, whatever it is part of (a leaf is gathered as one anyway)."""
    _IS_TILE.put(module, True)


def is_tile(module: nn.Module) -> bool:
    """Whether a module is a tile."""
    return _IS_TILE.own_of(module) is True


def mark_leaves(model: nn.Module, classes: Sequence[str], names: Sequence[str], suffixes: Sequence[str]) -> None:
    """Mark the leaves the config names: by class name or path, by module name, by the end of a module name."""
    for name, module in model.named_modules():
        if (
            type(module).__name__ in classes
            or _path(type(module)) in classes
            or name in names
            or any(name.endswith(suffix) for suffix in suffixes)
        ):
            set_z3_leaf_module(module, True)


def _path(kind: type[Any]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that the forward of `module` reads `parameter`, which belongs to another module.

    Not needed for correctness: such reads are found when they happen. Said before `initialize`, the parameter is
    fetched in time.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise EngineRuntimeError(
            "register_external_parameter takes a module and a parameter, got "
            f"{type(module).__name__} and {type(parameter).__name__}"
        )
    _EXTERNAL.put(module, [*external_parameters(module), parameter])


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`."""
    known = external_parameters(module)
    known[:] = [param for param in known if param is not parameter]


def external_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of other modules that the forward of `module` reads."""
    return _EXTERNAL.own_of(module) or []
