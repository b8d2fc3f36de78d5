"""The hooks that tie units to autograd and to the modules' forward: a guard and a verb, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from launcher.zero.grads import GradientReducer
from launcher.zero.unit import FlatUnit


def install_hooks(units: list[FlatUnit], reducer: GradientReducer) -> list[RemovableHandle]:
    """Let gradients flow into the units, and let each unit's first reader wait for its parameters."""
    handles: list[RemovableHandle] = []
    for unit in units:
        for index, param in enumerate(unit.members.params):
            hook = _gradient_hook(reducer, unit, index)
            handles.append(param.register_post_accumulate_grad_hook(hook))
        for anchor in unit.members.anchors:
            handles.append(anchor.register_forward_pre_hook(_forward_hook(unit)))
    return handles


def _gradient_hook(reducer: GradientReducer, unit: FlatUnit, index: int) -> Callable[[Tensor], None]:
    def on_gradient(_param: Tensor) -> None:
        reducer.take_gradient(unit, index)

    return on_gradient


def _forward_hook(unit: FlatUnit) -> Callable[[nn.Module, Any], None]:
    def before_forward(_module: nn.Module, _inputs: Any) -> None:
        unit.wait_for_parameters()

    return before_forward
