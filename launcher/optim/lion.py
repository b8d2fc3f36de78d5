"""Lion in plain torch: the sign of an interpolated momentum.

Chen et al., "Symbolic Discovery of Optimization Algorithms", https://arxiv.org/abs/2302.06675, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

# Parameters updated together. Each batch needs one temporary of its size; all at once would need a whole shard's.
BATCH_NUMEL = 2**24


class Lion(torch.optim.Optimizer):
    """Decoupled weight decay, then a step of size lr along sign(beta1 * momentum + (1 - beta1) * grad)."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # overloads
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for params in _batches(param for param in group["params"] if param.grad is not None):
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        grads = [param.grad for param in params if param.grad is not None]
        for param in params:
            if "exp_avg" not in self.state[param]:
                self.state[param]["exp_avg"] = torch.zeros_like(param)
        averages = [self.state[param]["exp_avg"] for param in params]
        directions = torch._foreach_mul(averages, beta1)
        torch._foreach_add_(directions, grads, alpha=1 - beta1)
        torch._foreach_sign_(directions)
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, directions, alpha=-lr)
        torch._foreach_mul_(averages, beta2)
        torch._foreach_add_(averages, grads, alpha=1 - beta2)


def _batches(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    numel = 0
    for param in params:
        if batch and numel + param.numel() > BATCH_NUMEL:
            yield batch
            batch, numel = [], 0
        batch.append(param)
        numel += param.numel()
    if batch:
        yield batch
