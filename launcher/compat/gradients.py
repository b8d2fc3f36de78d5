"""The gradients of several parameters at once, by DeepSpeed's function: `deepspeed.utils`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from launcher.zero import safe_get_full_grad, safe_set_full_grad


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the gradient that the next step will see by `update_func(gradient, parameter)`, for each parameter.

    Collective: every rank must call it, between `engine.backward` of the last micro-batch and `engine.step`, with a
    function that returns the same on every rank. Parameters without a gradient are left out.
    """
    for param in param_list:
        grad = safe_get_full_grad(param) if param.requires_grad else None
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))
