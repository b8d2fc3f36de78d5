"""`deepspeed.ops.adam`: Adam and AdamW, by the names of DeepSpeed's implementations.

The engine takes their steps with its own kernels; used without an engine they are torch's classes.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.comm.groups import is_first_rank

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
        if isinstance(model_params, list):
            _warn_of_another_optimizer(model_params)
        super().__init__(model_params, adamw_mode, {**options, "weight_decay": weight_decay, "amsgrad": amsgrad})


def _warn_of_another_optimizer(groups: list[Any]) -> None:
    """Warn where groups have options of another optimizer: accelerate makes every optimizer an Adam under offload."""
    known = inspect.signature(torch.optim.Adam).parameters
    for group in groups:
        others = [] if not isinstance(group, dict) or "betas" in group else sorted({*group} - {*known, "initial_lr"})
        if len(others) > 1 and is_first_rank():  # one may be a mark of the script's own
            get_logger().warning(
                "Adam updates the parameters in place of the optimizer whose groups have %s: accelerate does so under"
                ' offload_optimizer ("zero_force_ds_cpu_optimizer": false in the config keeps your optimizer)',
                ", ".join(others),
            )
            return


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
