"""`deepspeed.ops.adagrad`: Adagrad, by the name of DeepSpeed's implementation."""

from __future__ import annotations

from typing import Any

import torch

from launcher.base.errors import EngineError

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """DeepSpeed's Adagrad on the CPU. The engine takes its steps; without one it is torch's."""

    steps_of = torch.optim.Adagrad

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        adamw_mode: bool = False,
    ) -> None:
        """adamw_mode: accelerate passes False to every class. Raises: EngineError for True."""
        if adamw_mode:
            raise EngineError("Adagrad has no decoupled weight decay", hint="leave adamw_mode out")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
        for group in self.param_groups:  # those of another optimizer say what that one does
            group.update(foreach=None, fused=None)
