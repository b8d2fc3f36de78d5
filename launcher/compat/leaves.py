"""Leaf modules by their names, by DeepSpeed's functions: `deepspeed.utils`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from launcher.base.errors import EngineError
from launcher.zero import set_z3_leaf_module

_Found = tuple[list[nn.Module], list[str]]


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> _Found:
    """Have modules of these names gathered as one, or not; return them, and the names that no module has.

    Call it before `initialize`. Raises: EngineError for such a name, unless `raise_if_not_found` is False.
    """
    return _set(model, module_names, flag, raise_if_not_found, lambda name, wanted: name == wanted)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> _Found:
    """Do the same for modules whose names end so."""
    return _set(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def _set(
    model: nn.Module, wanted: Sequence[str], flag: bool, raises: bool, matches: Callable[[str, str], bool]
) -> _Found:
    modules = dict(model.named_modules())
    found = list(dict.fromkeys(modules[name] for word in wanted for name in modules if matches(name, word)))
    missing = [word for word in wanted if not any(matches(name, word) for name in modules)]
    if missing and raises:
        raise EngineError(f"the model has no module named {missing[0]}", hint="see model.named_modules()")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing
