"""`deepspeed.runtime.fp16.loss_scaler`: the scale of fp16 losses, by DeepSpeed's classes.

The engine has one of its own, `optimizer.loss_scaler`; these are for loops that scale losses themselves, and for what
names the classes, such as `torch.serialization.add_safe_globals`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.compat.ranks import get_rank
from launcher.optim.scaling import LossScaler as _Scaler
from launcher.optim.scaling import LossScaleRules


class LossScalerBase:
    """A loss scale and the rules by which it changes."""

    dynamic = False
    dtype = torch.half  # of the gradients

    def __init__(self, rules: LossScaleRules) -> None:
        self._scaler = _Scaler(rules)

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Take over what pickle has kept: attributes of this class, or of DeepSpeed's of the same name."""
        if "cur_scale" not in state:
            self.__dict__.update(state)
            return
        kind: Any = type(self)
        names = inspect.signature(kind).parameters  # DeepSpeed's attributes are named as the arguments
        same = kind(state["cur_scale"], **{name: state[name] for name in names if name in state})
        self.__dict__.update(same.__dict__)
        started = self._scaler.state_dict()
        num_steps, last_overflow = state.get("cur_iter", 0), state.get("last_overflow_iter", -1)
        hysteresis = state.get("cur_hysteresis", started["hysteresis"])
        self._scaler.load_state_dict(
            {**started, "num_steps": num_steps, "last_overflow": last_overflow, "hysteresis": hysteresis}
        )

    @property
    def loss_scale(self) -> float:
        """What a loss is multiplied by."""
        return self._scaler.scale

    @property
    def cur_scale(self) -> float:
        """The same; it can be set."""
        return self._scaler.scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        self._scaler.scale = float(scale)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale."""
        return loss * self._scaler.scale

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Compute gradients of the scaled loss."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def update_scale(self, overflow: bool) -> None:
        """Choose the scale of the next step; rank 0 logs an overflow.

        Raises: EngineError after overflows that no scale can cure.
        """
        said = self._scaler.update(overflow=overflow)
        if said is not None and get_rank() == 0:
            get_logger().info("%s", said if self.dtype == torch.half else said.partition(" Attempted")[0])


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
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        """raise_error_at_min_scale: at the first overflow at `min_scale`; False: that scale stays.

        dtype: of the gradients; only for fp16 does the log say what the scale is.
        """
        rules = LossScaleRules(
            float(init_scale),
            window=scale_window,
            hysteresis=delayed_shift,
            consecutive_hysteresis=consecutive_hysteresis,
            min_scale=float(min_scale),
            max_overflows_at_minimum=1 if raise_error_at_min_scale else None,
        )
        super().__init__(rules)
        self.dtype = dtype


def CreateLossScaler(
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: Mapping[str, Any] | None,
) -> LossScalerBase:
    """Return the scaler for a precision; only fp16 has a scale other than 1.

    dynamic_loss_args: the arguments of `DynamicLossScaler`. Raises: EngineError when they are missing.
    """
    if dtype != torch.half:
        return LossScaler()
    if not dynamic_scaling:
        return LossScaler(static_loss_scale)
    if dynamic_loss_args is None:
        raise EngineError("CreateLossScaler(): a dynamic scale needs dynamic_loss_args", hint="see DynamicLossScaler")
    return DynamicLossScaler(dtype=dtype, **dynamic_loss_args)
