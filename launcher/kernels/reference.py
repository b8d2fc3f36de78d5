"""The update rules in plain torch: the truth every kernel is tested against, on any device.

Where torch.optim has `add(alpha=)`, `addcmul` or `lerp`, a product and a sum are rounded once: where terms cancel, the
difference from two roundings is more than the last place. torch itself rounds once only where the CPU has an
instruction for it, so here the sum is taken in fp64, in which the product is exact.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from launcher.kernels.api import Adagrad, Adam, DeviceScale, GradScale, Lamb, Lion, Rule, Sgd, Span

_Moments = TypeVar("_Moments", Adam, Lamb)


class ReferenceKernel:
    """Each rule written down once, with a temporary for each operation."""

    name = "torch reference"

    def update(self, spans: Sequence[Span], grad_scale: GradScale = 1.0) -> None:
        """Update every span from its gradient times `grad_scale`."""
        factor, skip = (
            (grad_scale.factor, grad_scale.skip) if isinstance(grad_scale, DeviceScale) else (grad_scale, None)
        )
        for span in spans:
            # Copies: what is updated in place may be the span's own memory, which a skipped step must not touch.
            master, states = span.master.float(), [state.to(torch.float32, copy=True) for state in span.states]
            updated = _updated(span.rule, master, _scaled(span.grad, factor), states)
            _write(span.master, updated, skip)
            for kept, state in zip(span.states, states, strict=True):
                _write(kept, state, skip)
            if span.param is not None:
                _write(span.param, updated, skip)

    def lamb_moments(self, spans: Sequence[Span], grad_scale: float = 1.0) -> Tensor:
        """Update the moments of LAMB; return fp64 [num_spans, 2]: sums of squares of weights and directions."""
        sums = []
        for span in spans:
            assert isinstance(span.rule, Lamb)
            master, states = span.master.float(), [state.float() for state in span.states]
            _update_moments(span.rule, _scaled(span.grad, grad_scale), states)
            for kept, state in zip(span.states, states, strict=True):
                kept.copy_(state)
            direction = _lamb_direction(span.rule, master, states)
            sums.append(torch.stack([master.double().square().sum(), direction.double().square().sum()]))
        return torch.stack(sums)

    def sum_of_squares(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares of all elements, scalar fp64."""
        return torch.stack([grad.double().square().sum() for grad in grads]).sum()

    def measure(self, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of squares, and where the first element is that is not finite: as `Kernel.measure` does."""
        return self.sum_of_squares(grads), first_bad_element(grads)


def first_bad_element(grads: Sequence[Tensor]) -> Tensor:
    """Return int64 [2]: which gradient has the first element that is not finite, and where; -1, -1 where none has.

    Of several largest elements `argmax` returns the first.
    """
    device = grads[0].device
    bad = {index: grad.isfinite().logical_not_() for index, grad in enumerate(grads) if grad.numel()}
    nowhere = torch.full((2,), -1, dtype=torch.int64, device=device)
    if not bad:
        return nowhere
    are_bad = torch.stack([each.any() for each in bad.values()])
    places = torch.stack([each.int().argmax() for each in bad.values()])
    pairs = torch.stack([torch.tensor([*bad], device=device), places], dim=1)
    first = pairs.index_select(0, are_bad.int().argmax(keepdim=True))[0]
    return torch.where(are_bad.any(), first, nowhere)


def _scaled(grad: Tensor, grad_scale: float | Tensor) -> Tensor:
    return grad.float() * grad_scale


def _write(target: Tensor, values: Tensor, skip: Tensor | None) -> None:
    """Write values in the type of `target`; where `skip` is 1 it keeps its own."""
    rounded = values.to(target.dtype)
    target.copy_(rounded if skip is None else torch.where(skip != 0, target, rounded))


def _updated(rule: Rule, master: Tensor, grad: Tensor, states: list[Tensor]) -> Tensor:
    """Return the new master; update `states` in place. All fp32."""
    if isinstance(rule, Adam):
        return _adam(rule, master, grad, states)
    if isinstance(rule, Adagrad):
        return _adagrad(rule, master, grad, states)
    if isinstance(rule, Lion):
        return _lion(rule, master, grad, states)
    if isinstance(rule, Sgd):
        return _sgd(rule, master, grad, states)
    return _fused(-(rule.lr * rule.trust_ratio), _lamb_direction(rule, master, states), master)


def _update_moments(rule: _Moments, grad: Tensor, states: list[Tensor]) -> None:
    exp_avg, exp_avg_sq = states
    weight = _fp32(1 - rule.beta1)
    is_nearer_to_grad = weight >= 0.5  # lerp starts from the nearer end
    exp_avg.copy_(_fused(weight - float(is_nearer_to_grad), grad - exp_avg, grad if is_nearer_to_grad else exp_avg))
    exp_avg_sq.copy_(_fused(grad * _fp32(1 - rule.beta2), grad, exp_avg_sq * rule.beta2))


def _adam(rule: Adam, master: Tensor, grad: Tensor, states: list[Tensor]) -> Tensor:
    if rule.is_decoupled:
        master = master * (1 - rule.lr * rule.weight_decay)
    elif rule.weight_decay:
        grad = _fused(rule.weight_decay, master, grad)
    _update_moments(rule, grad, states)
    correction1 = 1 - rule.beta1**rule.step if rule.corrects_bias else 1.0
    correction2 = 1 - rule.beta2**rule.step if rule.corrects_bias else 1.0
    denominator = _sqrt(states[1]) / math.sqrt(correction2) + rule.eps
    return master.addcdiv(states[0], denominator, value=-(rule.lr / correction1))


def _adagrad(rule: Adagrad, master: Tensor, grad: Tensor, states: list[Tensor]) -> Tensor:
    if rule.weight_decay:
        grad = _fused(rule.weight_decay, master, grad)
    states[0].copy_(_fused(grad, grad, states[0]))
    lr = rule.lr / (1 + (rule.step - 1) * rule.lr_decay)
    return master.addcdiv(grad, _sqrt(states[0]) + rule.eps, value=-lr)


def _lion(rule: Lion, master: Tensor, grad: Tensor, states: list[Tensor]) -> Tensor:
    direction = (states[0] * rule.beta1 + grad * (1 - rule.beta1)).sign()
    states[0].copy_(_fused(1 - rule.beta2, grad, states[0] * rule.beta2))
    return master * (1 - rule.lr * rule.weight_decay) - rule.lr * direction


def _sgd(rule: Sgd, master: Tensor, grad: Tensor, states: list[Tensor]) -> Tensor:
    if rule.weight_decay:
        grad = _fused(rule.weight_decay, master, grad)
    if rule.momentum:
        if rule.is_first:
            states[0].copy_(grad)
        else:
            states[0].copy_(_fused(1 - rule.dampening, grad, states[0] * rule.momentum))
        grad = _fused(rule.momentum, states[0], grad) if rule.is_nesterov else states[0]
    return _fused(-rule.lr, grad, master)


def _lamb_direction(rule: Lamb, master: Tensor, states: list[Tensor]) -> Tensor:
    correction1 = 1 - rule.beta1**rule.step if rule.corrects_bias else 1.0
    correction2 = 1 - rule.beta2**rule.step if rule.corrects_bias else 1.0
    variance = states[1] * (1 / correction2)
    root = _sqrt(variance + rule.eps) if rule.is_eps_inside_root else _sqrt(variance) + rule.eps
    return _fused(rule.weight_decay, master, states[0] * (1 / correction1) / root)


def _fp32(value: float) -> float:
    """Return the nearest number of fp32: what torch multiplies an fp32 tensor by."""
    return ctypes.c_float(value).value


def _fused(factor: Tensor | float, other: Tensor, addend: Tensor) -> Tensor:
    """Return factor * other + addend in fp32, rounded once."""
    wide = factor.double() if isinstance(factor, Tensor) else _fp32(factor)
    return (other.double() * wide).add_(addend).float()


def _sqrt(values: Tensor) -> Tensor:
    """Return the root rounded to nearest. On CPUs torch's own is MKL's: one in six is off by one in the last place."""
    return values.double().sqrt().float()
