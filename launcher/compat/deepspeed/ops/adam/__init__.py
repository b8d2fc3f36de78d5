"""`deepspeed.ops.adam`: Adam and AdamW, by the names of DeepSpeed's implementations.

The engine takes their steps with its own kernels; used without an engine they are torch's classes.
"""

from __future__ import annotations

from typing import Any

import torch

from launcher.base.errors import EngineError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class _Adam(torch.optim.Adam):
    """Adam with decoupled weight decay or not; `steps_of` tells the engine which."""

    def __init__(self, params: Any, is_decoupled: bool, options: dict[str, Any]) -> None:
        if not options.pop("bias_correction", True):
            raise EngineError(
                f"{type(self).__name__}(bias_correction=False) is not supported",
                hint='name the optimizer in the config: "params": {"bias_correction": false}',
            )
        super().__init__(params, decoupled_weight_decay=is_decoupled, **options)
        for group in self.param_groups:  # those of another optimizer say what that one does
            group.update(decoupled_weight_decay=is_decoupled, foreach=None, fused=None)

    @property
    def steps_of(self) -> type[torch.optim.Optimizer]:
        """The class of torch whose steps these are."""
        return torch.optim.AdamW if self.defaults["decoupled_weight_decay"] else torch.optim.Adam


class DeepSpeedCPUAdam(_Adam):
    """DeepSpeed's Adam on the CPU."""

    steps_of = _Adam.steps_of

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
    ) -> None:
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(model_params, adamw_mode, {**options, "weight_decay": weight_decay, "amsgrad": amsgrad})


class FusedAdam(_Adam):
    """DeepSpeed's Adam on the GPU."""

    steps_of = _Adam.steps_of

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
    ) -> None:
        options = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, adam_w_mode, {**options, "weight_decay": weight_decay, "amsgrad": amsgrad})
