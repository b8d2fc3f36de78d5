"""`deepspeed.runtime.fp16`."""

from . import loss_scaler

__all__ = ["loss_scaler"]
