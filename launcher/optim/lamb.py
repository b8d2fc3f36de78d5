"""LAMB in plain torch: Adam's direction, as long as each parameter's norm and a trust ratio say.

You et al., "Large Batch Optimization for Deep Learning", https://arxiv.org/abs/1904.00962, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from launcher.kernels.api import Lamb as LambRule
from launcher.kernels.api import Span
from launcher.kernels.reference import ReferenceKernel
from launcher.optim.shared import Closure, evaluated, moment_options


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
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
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
