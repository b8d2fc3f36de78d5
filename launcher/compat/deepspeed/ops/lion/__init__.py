"""`deepspeed.ops.lion`: Lion, by the names of DeepSpeed's implementations."""

from __future__ import annotations

from typing import Any

from launcher.base.errors import EngineError
from launcher.optim.lion import Lion

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class DeepSpeedCPULion(Lion):
    """DeepSpeed's Lion on the CPU. The engine takes its steps; without one it is plain torch."""

    steps_of = Lion

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        adamw_mode: bool = False,
    ) -> None:
        """adamw_mode: accelerate passes False to every class. Raises: EngineError for True."""
        if adamw_mode:
            raise EngineError("adamw_mode is Adam's: Lion's weight decay is always decoupled", hint="leave it out")
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)


class FusedLion(Lion):
    """DeepSpeed's Lion on the GPU."""

    steps_of = Lion
