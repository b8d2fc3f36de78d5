"""`deepspeed.ops.lamb`: LAMB, by the name of DeepSpeed's implementation."""

from __future__ import annotations

from typing import Any

from launcher.base.errors import EngineError
from launcher.optim.lamb import Lamb

__all__ = ["FusedLamb"]


class FusedLamb(Lamb):
    """DeepSpeed's LAMB on the GPU. The engine takes its steps; without one it is plain torch."""

    steps_of = Lamb

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        """options: those of `Lamb`. Raises: EngineError for `amsgrad` and `max_grad_norm`, TypeError for another."""
        if options.pop("amsgrad", False) or options.pop("max_grad_norm", 0.0):
            raise EngineError(
                "FusedLamb has neither amsgrad nor max_grad_norm", hint='set "gradient_clipping" in the config'
            )
        super().__init__(params, lr=lr, **options)
