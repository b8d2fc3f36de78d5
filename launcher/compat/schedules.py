"""The schedules of the config's vocabulary, as classes over an optimizer."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from launcher.optim.schedules import SCHEDULES, LRSchedule, formulas_of

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


class _OverOptimizer(LRSchedule):
    """A schedule named as its class. `step()` is called once after each optimizer step: by the engine, if it has it."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, *args: Any, last_batch_iteration: int = -1, **params: Any
    ) -> None:
        """args, params: those of the config's `scheduler.params`, in DeepSpeed's order. Raises: ConfigError."""
        kind = type(self).__name__
        names = [*inspect.signature(SCHEDULES[kind]).parameters, "last_batch_iteration"]
        given = {**dict(zip(names, args, strict=False)), **params}
        last = given.pop("last_batch_iteration", last_batch_iteration)
        groups = optimizer.param_groups
        learning_rate, momentum = formulas_of(kind, given, groups)
        self.optimizer = optimizer
        super().__init__(learning_rate, groups, float(groups[0]["lr"]), momentum, last)


class WarmupLR(_OverOptimizer):
    """Rises to `warmup_max_lr`, then stays."""


class WarmupDecayLR(_OverOptimizer):
    """Rises as WarmupLR, then falls linearly."""


class WarmupCosineLR(_OverOptimizer):
    """Rises, then falls on a half cosine."""


class LRRangeTest(_OverOptimizer):
    """Rises without end, to find the rate at which training diverges."""


class OneCycle(_OverOptimizer):
    """Rises and falls once, the momentum the other way, then decays."""
