"""The optimizer object users hold: live parameter groups over sharded states."""

from __future__ import annotations

from typing import Any

from launcher.base.errors import EngineError
from launcher.optim.api import FlatOptimizer


class ZeroOptimizer:
    """What `initialize()` returns as optimizer. Groups are live: a learning rate written there is used.

    Steps are taken by `engine.step()`, which knows the accumulation boundary.
    """

    def __init__(self, flat: FlatOptimizer) -> None:
        self.optimizer = flat
        self.overflow = False  # the last step was skipped because the gradient norm was not finite

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        """Refuse: a step from here would bypass accumulation and reduction. Raises: EngineError."""
        raise EngineError("optimizer.step() was called", hint="call engine.step(), which also steps the optimizer")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine drops gradients after each step; scripts call this out of habit."""
