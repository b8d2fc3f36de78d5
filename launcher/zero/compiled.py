"""Hooks and torch.compile: a hook is never a part of a graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def outside_graphs(hook: _F) -> _F:
    """Decorate a hook: where a compiled forward calls it, the graph ends there and the hook runs as Python.

    As `torch.compiler.disable` does, but without importing the compiler (1.5 s) where nothing is compiled.
    """

    disabled: Callable[..., Any] | None = None

    @functools.wraps(hook)
    def outside(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None and "torch._dynamo" in sys.modules:
            disabled = torch.compiler.disable(hook)
            # Or it compiles this function too, once for each number of arguments, and warns that these are many.
            torch._dynamo.decorators.skip(outside)
        return (disabled or hook)(*args, **kwargs)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]  # what torch.compile looks for
    return outside  # type: ignore[return-value]
