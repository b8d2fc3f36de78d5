"""What the project's own optimizer classes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Closure = Callable[[], float]


def evaluated(closure: Closure | None) -> float | None:
    """Return the loss of a closure that computes gradients anew, None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def moment_options(group: Mapping[str, Any]) -> tuple[float, float, float, float, float]:
    """Return lr, beta1, beta2, eps and weight_decay of a group: what a step along moments takes, in a rule's order."""
    beta1, beta2 = map(float, group["betas"])
    return float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"])
