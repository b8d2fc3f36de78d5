"""The optimizer object users hold: live parameter groups over sharded states."""

from __future__ import annotations

from typing import Any

import torch

from launcher.base.errors import EngineError
from launcher.optim.api import FlatOptimizer
from launcher.optim.factory import OptimizerPlan


class ZeroOptimizer(torch.optim.Optimizer):
    """What `initialize()` returns as optimizer. Groups are live: a learning rate written there is used.

    A torch optimizer for everything that reads or writes groups, such as `torch.optim.lr_scheduler`. Steps are taken
    by `engine.step()`, which knows the accumulation boundary; states are this rank's shards, in `optimizer`.
    """

    def __init__(self, flat: FlatOptimizer, plan: OptimizerPlan) -> None:
        super().__init__(plan.param_groups, dict(plan.defaults))
        self.param_groups = flat.param_groups  # the client's own list, where a client brought the optimizer
        self.optimizer = flat
        self._client = plan.client
        self.loss_scale = 1.0  # what the loss is multiplied by before backward
        self.overflow = False  # the last step was skipped because the gradient norm was not finite

    def note_step(self, *, overflow: bool) -> None:
        """Remember how the engine's step went."""
        self.overflow = overflow
        if not overflow:
            # torch's schedules warn when they are stepped before an optimizer that they watch through this mark.
            for watched in (self, self._client):
                if watched is not None:
                    watched._opt_called = True  # type: ignore[attr-defined]  # torch sets it on instances

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch overloads it
        """Refuse: a step from here would bypass accumulation and reduction. Raises: EngineError."""
        raise EngineError("optimizer.step() was called", hint="call engine.step(), which also steps the optimizer")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine drops gradients after each step; scripts call this out of habit."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse after construction: units are laid out once. Raises: EngineError."""
        if hasattr(self, "optimizer"):
            raise EngineError("a parameter group cannot be added to a running engine", hint="call initialize() anew")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's states and the hyper-parameters; see `FlatOptimizer.state_dict`."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()` of the same rank, world size and stage."""
        self.optimizer.load_state_dict(state_dict)
