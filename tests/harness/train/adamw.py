"""AdamW in plain torch with the roundings of the engine's kernels, whatever instructions torch itself uses.

Torch's fused AdamW rounds a product and a sum once where the CPU can (AVX2, AVX-512, NEON) and twice where it cannot,
so a reference that must equal the engine bit by bit cannot be torch's own on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from launcher.kernels.select import kernel_for


class OnceRoundedAdamW(torch.optim.Optimizer):
    """AdamW in fp32 that rounds fused products and sums once, for a beta1 above 0.5. States have the param's dtype."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is used here
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad.float(), group)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        lr, (beta1, beta2) = group["lr"], group["betas"]
        root = math.sqrt(1 - beta2 ** state["step"])
        exp_avg, exp_avg_sq = state["exp_avg"].float(), state["exp_avg_sq"].float()
        exp_avg = _fused(_fp32(1 - beta1), grad - exp_avg, exp_avg)
        exp_avg_sq = _fused(_fp32(1 - beta2) * grad, grad, exp_avg_sq * _fp32(beta2))
        denominator = exp_avg_sq.double().sqrt().float() / _fp32(root) + _fp32(group["eps"])
        change = _fp32(-(lr / (1 - beta1 ** state["step"]))) * exp_avg / denominator
        param.copy_(param.float() * _fp32(1 - lr * group["weight_decay"]) + change)
        state["exp_avg"].copy_(exp_avg)
        state["exp_avg_sq"].copy_(exp_avg_sq)


def engines_adamw(params: Iterable[Tensor], lr: float, weight_decay: float, **options: Any) -> torch.optim.Optimizer:
    """Return an AdamW with the bits of the one the engine uses on this CPU: its kernel's, else torch's own."""
    if kernel_for("cpu") is None:
        return torch.optim.AdamW(list(params), lr=lr, weight_decay=weight_decay, fused=True, **options)
    return OnceRoundedAdamW(params, lr, weight_decay, **options)


def _fp32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def _fused(factor: Tensor, other: Tensor, addend: Tensor) -> Tensor:
    """Return factor * other + addend, rounded once: in fp64 the product is exact."""
    return (factor.double() * other.double() + addend.double()).float()
