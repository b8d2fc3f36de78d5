"""Lion in plain torch: the sign of an interpolated momentum.

Chen et al., "Symbolic Discovery of Optimization Algorithms", https://arxiv.org/abs/2302.06675, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from launcher.optim.shared import Closure, evaluated

# Elements updated together, by kind of device: all at once would need a temporary of a whole shard. On a CPU the
# pieces also stay in the cache: 35 M elements on one thread took 117 ms in pieces of 16 M, 32 ms in these.
BATCH_NUMEL = {"cpu": 2**18}
DEFAULT_BATCH_NUMEL = 2**24
Batch = tuple[list[Tensor], list[Tensor], list[Tensor]]  # parameters, gradients, momenta: pieces of equal shapes


class Lion(torch.optim.Optimizer):
    """Decoupled weight decay, then a step of size lr along sign(beta1 * momentum + (1 - beta1) * grad)."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]  # overloads
        """Update every parameter that has a gradient."""
        loss = evaluated(closure)
        for group in self.param_groups:
            for batch in _batches(self._with_momentum(group["params"])):
                _update(*batch, group)
        return loss

    def _with_momentum(self, params: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for param in params:
            if param.grad is not None:
                state = self.state[param]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(param)
                yield param, param.grad, state["exp_avg"]


def _update(params: list[Tensor], grads: list[Tensor], averages: list[Tensor], group: dict[str, Any]) -> None:
    lr, (beta1, beta2) = group["lr"], group["betas"]
    directions = torch._foreach_mul(averages, beta1)
    torch._foreach_add_(directions, grads, alpha=1 - beta1)
    torch._foreach_sign_(directions)
    if group["weight_decay"]:
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
    torch._foreach_add_(params, directions, alpha=-lr)
    torch._foreach_mul_(averages, beta2)
    torch._foreach_add_(averages, grads, alpha=1 - beta2)


def _batches(triples: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Iterator[Batch]:
    """Cut parameters into pieces and gather those into batches of bounded size."""
    batch: Batch = ([], [], [])
    numel = 0
    for triple in triples:
        bound = BATCH_NUMEL.get(triple[0].device.type, DEFAULT_BATCH_NUMEL)
        for pieces in _pieces(triple, bound):
            if batch[0] and numel + pieces[0].numel() > bound:
                yield batch
                batch, numel = ([], [], []), 0
            for gathered, piece in zip(batch, pieces, strict=True):
                gathered.append(piece)
            numel += pieces[0].numel()
    if batch[0]:
        yield batch


def _pieces(triple: tuple[Tensor, ...], bound: int) -> Iterable[tuple[Tensor, ...]]:
    if triple[0].numel() <= bound or not all(tensor.is_contiguous() for tensor in triple):
        return [triple]
    return zip(*(tensor.view(-1).split(bound) for tensor in triple), strict=True)
