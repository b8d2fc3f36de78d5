"""LAMB written down plainly, one parameter after another."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class PlainLamb:
    """You et al., https://arxiv.org/abs/1904.00962, algorithm 2, with bounds on the trust ratio."""

    def __init__(
        self,
        params: Iterable[Tensor],
        *,
        lr: float,
        weight_decay: float,
        most: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        is_eps_inside_root: bool = False,
    ) -> None:
        """most: the largest trust ratio; the smallest is 0.01."""
        self.param_groups = [{"params": list(params), "lr": lr}]
        self.weight_decay, self.most, self.betas, self.eps = weight_decay, most, betas, eps
        self.is_eps_inside_root = is_eps_inside_root
        self.moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in self.param_groups[0]["params"]}
        self.num_steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.num_steps += 1
        beta1, beta2 = self.betas
        for p, (m, v) in self.moments.items():
            if p.grad is None:
                continue
            m.copy_(beta1 * m + (1 - beta1) * p.grad)
            v.copy_(beta2 * v + (1 - beta2) * p.grad**2)
            m_hat, v_hat = m / (1 - beta1**self.num_steps), v / (1 - beta2**self.num_steps)
            root = (v_hat + self.eps).sqrt() if self.is_eps_inside_root else v_hat.sqrt() + self.eps
            update = m_hat / root + self.weight_decay * p
            ratio = p.norm() / update.norm() if p.norm() > 0 and update.norm() > 0 else torch.tensor(1.0)
            p -= self.param_groups[0]["lr"] * ratio.clamp(0.01, self.most) * update

    def zero_grad(self) -> None:
        for p in self.moments:
            p.grad = None
