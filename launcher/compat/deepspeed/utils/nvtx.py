"""`deepspeed.utils.nvtx`: functions as ranges of a profile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["instrument_w_nvtx"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def instrument_w_nvtx(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return `func` such that its calls are ranges of its name in a trace of torch's profiler."""

    @functools.wraps(func)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.profiler.record_function(func.__qualname__):
            return func(*args, **kwargs)

    return wrapped
