"""Muon in plain torch, with AdamW for what is not a matrix; and its step as rules that kernels take.

Jordan et al., https://kellerjordan.github.io/posts/muon/; options and defaults are DeepSpeed's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from launcher.base.errors import EngineError
from launcher.kernels.api import Adam, Sgd, Span
from launcher.kernels.reference import ReferenceKernel
from launcher.optim.classes import Closure, evaluated, moment_options, with_gradients
from launcher.sharding.layout import unsharded_shape

# ---- Newton-Schulz iterations: from a matrix to one with the same singular vectors and singular values near 1 ----
# Jordan et al., "Muon", https://kellerjordan.github.io/posts/muon/: the odd polynomial a·x + b·x³ + c·x⁵, applied to
# all singular values at once, brings those above 0.001 of the norm to between 0.7 and 1.2 in five steps.


# After so many steps on the Gram matrix it is made anew: rounding lets it drift from what it stands for.
_RESTART_AFTER = 2


@dataclass(frozen=True)
class Iteration:
    """How matrices are orthogonalised."""

    dtype: torch.dtype  # of the matrices given and returned
    is_gram: bool = False  # iterate on X·Xᵀ instead of X, where X is not square: fewer products with the long side
    coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    num_steps: int = 5
    eps: float = 1e-7  # least norm a matrix is divided by


def orthogonalized(matrix: Tensor, how: Iteration) -> Tensor:
    """Return the orthogonalised matrix, [rows, columns] in `how.dtype`; of zeros zeros. `matrix` stays as it is."""
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm().clamp(min=how.eps)
    result = _by_gram(wide, how) if how.is_gram and wide.size(0) < wide.size(1) else _by_matrix(wide, how)
    return result.T if matrix.size(0) > matrix.size(1) else result


def _by_matrix(wide: Tensor, how: Iteration) -> Tensor:
    a, b, c = how.coefficients
    for _ in range(how.num_steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide


def _by_gram(wide: Tensor, how: Iteration) -> Tensor:
    """Iterate on the Gram matrix: https://dao-lab.ai/blog/2026/gram-newton-schulz.

    A step multiplies X by P = a·I + Z, Z = b·R + c·R² of R = X·Xᵀ, which turns R into P·R·P: all steps up to the
    restart are one product with X. On 16 bits it runs in fp16, which after normalisation loses less than bf16.
    """
    a, b, c = how.coefficients
    x = wide if how.dtype == torch.float32 else wide.half()
    for num_steps in (_RESTART_AFTER, how.num_steps - _RESTART_AFTER):
        gram = x @ x.T
        product: Tensor | None = None
        for step in range(num_steps):
            z = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            if step + 1 < num_steps:
                half = torch.addmm(gram, z, gram, beta=a)
                gram = torch.addmm(half, z, half, beta=a)
            if product is None:
                product = z
                product.diagonal().add_(a)
            else:
                product = torch.addmm(product, z, product, beta=a)
        x = x if product is None else product @ x
    return x.to(how.dtype)


# ---- Muon in plain torch, with AdamW for what is not a matrix; and its step as rules that kernels take ----


NS_METHODS = ("gram", "standard")


class Muon(torch.optim.Optimizer):
    """Muon over the groups that set `use_muon`, AdamW over the others."""

    OF_MATRICES: ClassVar[dict[str, Any]] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"}
    OF_THE_REST: ClassVar[dict[str, Any]] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}

    def __init__(self, param_groups: Iterable[dict[str, Any]]) -> None:
        """param_groups: each with `params`, `use_muon` and what it sets of the options above.

        Raises: EngineError for a group that does not say `use_muon`, or for Muon over parameters of fewer than two
        dimensions.
        """
        groups = [dict(group) for group in param_groups]
        for index, group in enumerate(groups):
            _check(index, group)
        defaults = (self.OF_MATRICES if group["use_muon"] else self.OF_THE_REST for group in groups)
        super().__init__([{**full, **group} for full, group in zip(defaults, groups, strict=True)], {})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]  # overloads
        """Update every parameter that has a gradient."""
        loss = evaluated(closure)
        kernel = ReferenceKernel()
        for param, group in with_gradients(self.param_groups):
            span = self._span(param, group)
            if group["use_muon"]:
                how = iteration(group, param.device)
                matrix = direction(span).view(as_matrix(param.shape)).to(how.dtype)
                span = descent(span, orthogonalized(matrix, how).reshape(-1), group, param.shape)
            kernel.update([span])
        return loss

    def _span(self, param: Tensor, group: dict[str, Any]) -> Span:
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        rule = muon_rule(group, state["step"])
        names = () if isinstance(rule, Sgd) and not rule.momentum else rule.STATES
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(param)
        states = tuple(state[name].view(-1) for name in names)
        assert param.grad is not None
        return Span(rule, param.view(-1), param.grad.view(-1), states)


# Classes whose matrices are orthogonalised; torch has its own since 2.9, over matrices alone.
MUON_KINDS: tuple[type[torch.optim.Optimizer], ...] = (
    (Muon, torch.optim.Muon) if hasattr(torch.optim, "Muon") else (Muon,)
)


def _check(index: int, group: Mapping[str, Any]) -> None:
    if "use_muon" not in group:
        raise EngineError(
            f"optimizer group {index} does not say whether Muon updates it", hint='add "use_muon": True or False'
        )
    flat = [unsharded_shape(param) for param in group["params"] if len(unsharded_shape(param)) < 2]
    if group["use_muon"] and flat:
        raise EngineError(
            f"optimizer group {index} uses Muon for a parameter of shape {tuple(flat[0])}, which is not a matrix",
            hint='move it to a group with "use_muon": False',
        )
    if group.get("ns_method", NS_METHODS[0]) not in NS_METHODS:
        raise EngineError(
            f"optimizer group {index} has the unknown ns_method {group['ns_method']!r}",
            hint=f"use one of {', '.join(NS_METHODS)}",
        )


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns: the filters of a convolution are its rows."""
    return shape[0], math.prod(shape[1:])


def uses_muon(group: Mapping[str, Any]) -> bool:
    """Whether a group's parameters are matrices to orthogonalise; torch's own class has no others."""
    return bool(group.get("use_muon", True))


def muon_rule(group: Mapping[str, Any], step: int) -> Adam | Sgd:
    """Return the rule of one step: of matrices SGD with momentum, whose direction is orthogonalised in between."""
    if uses_muon(group):
        lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
        momentum, is_nesterov = float(group["momentum"]), bool(group.get("nesterov", True))
        return Sgd(lr, momentum, 0.0, weight_decay, is_nesterov=is_nesterov, is_first=False)
    return Adam(*moment_options(group), step)


def iteration(group: Mapping[str, Any], device: torch.device) -> Iteration:
    """Return how the matrices of a group are orthogonalised on a device.

    In bf16, as torch's own class always does; but where bf16 gains nothing, on CPUs, in fp32.
    """
    if "ns_method" in group:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        return Iteration(dtype, is_gram=group["ns_method"] == "gram")
    return Iteration(torch.bfloat16, False, tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])


def direction(span: Span, grad_scale: float = 1.0) -> Tensor:
    """Bring the momentum of a span up to date; return where it leads (fp32, a new tensor), to be orthogonalised."""
    assert isinstance(span.rule, Sgd)
    grad = span.grad.float() * grad_scale
    if not span.states:
        return grad
    momentum = span.states[0].float()
    momentum.lerp_(grad, 1 - span.rule.momentum)
    if momentum is not span.states[0]:
        span.states[0].copy_(momentum)
    return grad.lerp_(momentum, span.rule.momentum) if span.rule.is_nesterov else momentum.clone()


def descent(span: Span, update: Tensor, group: Mapping[str, Any], shape: torch.Size) -> Span:
    """Return the span that moves weights against what the direction became, 1-D, as long as the shape asks for."""
    assert isinstance(span.rule, Sgd)
    rows, columns = as_matrix(shape)
    if group.get("adjust_lr_fn") == "match_rms_adamw":
        ratio = 0.2 * math.sqrt(max(rows, columns))  # Liu et al., https://arxiv.org/abs/2502.16982
    else:
        ratio = math.sqrt(max(1.0, rows / columns))
    rule = replace(span.rule, lr=span.rule.lr * ratio, weight_decay=span.rule.weight_decay / ratio, momentum=0.0)
    return Span(rule, span.master, update, (), span.param)
