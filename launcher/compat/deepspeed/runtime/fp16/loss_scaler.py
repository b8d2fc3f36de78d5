"""`deepspeed.runtime.fp16.loss_scaler`: the scale of fp16 losses, by DeepSpeed's classes.

The engine has one of its own, `optimizer.loss_scaler`; these are for loops that scale losses themselves, and for what
names the classes, such as `torch.serialization.add_safe_globals`.
"""

from __future__ import annotations

from torch import Tensor

from launcher.optim.scaling import LossScaler as _Scaler
from launcher.optim.scaling import LossScaleRules

__all__ = ["DynamicLossScaler", "LossScaler", "LossScalerBase"]


class LossScalerBase:
    """A loss scale and the rules by which it changes."""

    dynamic = False

    def __init__(self, rules: LossScaleRules) -> None:
        self._scaler = _Scaler(rules)

    @property
    def loss_scale(self) -> float:
        """What a loss is multiplied by."""
        return self._scaler.scale

    @property
    def cur_scale(self) -> float:
        """The same."""
        return self._scaler.scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return loss * self._scaler.scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Compute gradients of the scaled loss."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def update_scale(self, overflow: bool) -> None:
        """Choose the scale of the next step. Raises: EngineError after many overflows that no scale can cure."""
        self._scaler.update(overflow=overflow)


class LossScaler(LossScalerBase):
    """A scale that stays."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(LossScaleRules(float(scale), is_dynamic=False))


class DynamicLossScaler(LossScalerBase):
    """A scale that overflows halve and good steps double. Its factor is 2."""

    dynamic = True

    def __init__(
        self,
        init_scale: float = 2**32,
        scale_window: int = 1000,
        min_scale: float = 1,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
    ) -> None:
        rules = LossScaleRules(
            float(init_scale),
            window=scale_window,
            hysteresis=delayed_shift,
            consecutive_hysteresis=consecutive_hysteresis,
            min_scale=float(min_scale),
        )
        super().__init__(rules)
