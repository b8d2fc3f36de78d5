"""Starting without torch's compiler: 1.5 to 2 s of CPU for each rank, where nothing is compiled."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

_MARK = "__dynamo_disable"


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Keep the construction of optimizers from importing torch._dynamo.

    `Optimizer.add_param_group` imports it only to be left out of compiled code, unless its function has the mark of
    that already (torch/_compile.py). The mark is taken away again: what is compiled later is as in torch. Where
    another torch knows no such mark, the import takes place.
    """
    function = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if function is None or hasattr(function, _MARK) or "torch._dynamo" in sys.modules:
        yield
        return
    setattr(function, _MARK, function)
    try:
        yield
    finally:
        delattr(function, _MARK)
