"""Lion and LAMB in plain torch, and what the project's own optimizer classes share.

Lion: Chen et al., "Symbolic Discovery of Optimization Algorithms", https://arxiv.org/abs/2302.06675, algorithm 2. LAMB:
You et al., "Large Batch Optimization for Deep Learning", https://arxiv.org/abs/1904.00962, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from launcher.kernels.api import Lamb as LambRule
from launcher.kernels.api import Span
from launcher.kernels.reference import ReferenceKernel

# ---- What the project's own optimizer classes share ----


Closure = Callable[[], float]


def evaluated(closure: Closure | None) -> float | None:
    """Return the loss of a closure that computes gradients anew, None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def with_gradients(groups: Iterable[dict[str, Any]]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Yield each parameter that has a gradient, with its group."""
    for group in groups:
        yield from ((param, group) for param in group["params"] if param.grad is not None)


def moment_options(group: Mapping[str, Any]) -> tuple[float, float, float, float, float]:
    """Return lr, beta1, beta2, eps and weight_decay of a group: what a step along moments takes, in a rule's order."""
    beta1, beta2 = map(float, group["betas"])
    return float(group["lr"]), beta1, beta2, float(group["eps"]), float(group["weight_decay"])


# ---- Lion ----


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


# ---- LAMB ----
# You et al., "Large Batch Optimization for Deep Learning", https://arxiv.org/abs/1904.00962, algorithm 2.


class Lamb(torch.optim.Optimizer):
    """LAMB. Trust ratios are bounded by `min_coeff` and `max_coeff`; a parameter or direction of zeros has 1."""

    OPTIONS: ClassVar[dict[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "bias_correction": True,
        "eps_inside_sqrt": False,
        "max_coeff": 10.0,
        "min_coeff": 0.01,
    }

    def __init__(self, params: Any, **options: Any) -> None:
        """options: those of `OPTIONS`. Raises: TypeError for another."""
        unknown = sorted(set(options) - set(self.OPTIONS))
        if unknown:
            raise TypeError(f"Lamb has no option {unknown[0]}")
        super().__init__(params, {**self.OPTIONS, **options})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]  # overloads
        """Update every parameter that has a gradient."""
        loss = evaluated(closure)
        kernel = ReferenceKernel()
        for param, group in with_gradients(self.param_groups):
            span = self._span(param, group)
            ratio = trust_ratios(kernel.lamb_moments([span]), [group])[0]
            kernel.update([with_trust_ratio(span, ratio)])
        return loss

    def _span(self, param: Tensor, group: dict[str, Any]) -> Span:
        state = self.state[param]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        assert param.grad is not None
        states = (state["exp_avg"].view(-1), state["exp_avg_sq"].view(-1))
        return Span(lamb_rule(group, state["step"]), param.view(-1), param.grad.view(-1), states)


def lamb_rule(group: Mapping[str, Any], step: int) -> LambRule:
    """Return the rule of one step, its trust ratio not known yet."""
    return LambRule(
        *moment_options(group),
        step,
        corrects_bias=group["bias_correction"],
        is_eps_inside_root=group["eps_inside_sqrt"],
    )


def trust_ratios(sums: Tensor, groups: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the factor of each parameter's step.

    sums: fp64 [num_parameters, 2], sums of squares of weights and directions; groups: the group of each parameter.
    """
    ratios = []
    for (weight, direction), group in zip(sums.sqrt().tolist(), groups, strict=True):
        ratio = weight / direction if weight > 0 and direction > 0 else 1.0
        ratios.append(min(max(ratio, group["min_coeff"]), group["max_coeff"]))
    return ratios


def with_trust_ratio(span: Span, ratio: float) -> Span:
    """Return a span of a LAMB step whose trust ratio is known."""
    assert isinstance(span.rule, LambRule)
    return replace(span, rule=replace(span.rule, trust_ratio=ratio))
