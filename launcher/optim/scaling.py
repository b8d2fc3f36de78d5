"""The loss scale of fp16 training as a state machine: pure numbers, the same on every rank.

fp16 gradients below 6e-8 vanish. The loss is therefore multiplied by a scale before backward and the gradients are
divided by it before the step; when a gradient overflows, the step is skipped and, unless the scale is fixed, halved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.base.errors import EngineError

FACTOR = 2.0  # between one scale and the next
# Steps in a row that overflow although the scale cannot get smaller, before the run ends: single bad batches pass.
MAX_OVERFLOWS_AT_MINIMUM = 20


@dataclass(frozen=True)
class LossScaleRules:
    """The keys of the config's `fp16` section that rule the scale."""

    initial_scale: float
    is_dynamic: bool = True
    window: int = 1000  # good steps before one that doubles the scale
    hysteresis: int = 2  # overflows before the scale is halved: all but the last of them leave it
    consecutive_hysteresis: bool = False  # every good step forgets earlier overflows, not only one that doubles
    min_scale: float = 1.0
    max_overflows_at_minimum: int | None = MAX_OVERFLOWS_AT_MINIMUM  # None: the run never ends for them


class LossScaler:
    """The scale in force, by DeepSpeed's rules for dynamic scales."""

    def __init__(self, rules: LossScaleRules) -> None:
        self.rules = rules
        self.scale = rules.initial_scale
        self._num_steps = 0  # steps taken or skipped so far
        self._last_overflow = -1  # the number of the last step that overflowed
        self._hysteresis = rules.hysteresis
        self._overflows_at_minimum = 0  # in a row

    @property
    def loss_scale(self) -> float:
        """The scale in force."""
        return self.scale

    @property
    def cur_scale(self) -> float:
        """The scale in force; it can be set."""
        return self.scale

    @cur_scale.setter
    def cur_scale(self, scale: float) -> None:
        self.scale = float(scale)

    @property
    def dynamic(self) -> bool:
        """Whether the scale follows overflows."""
        return self.rules.is_dynamic

    # What else scripts for DeepSpeed read of a scaler, by its names.

    dynamic_loss_scale = dynamic

    @property
    def scale_window(self) -> int:
        """The good steps before one that doubles the scale."""
        return self.rules.window

    @property
    def min_loss_scale(self) -> float:
        """The smallest scale."""
        return self.rules.min_scale

    @property
    def cur_iter(self) -> int:
        """The steps taken or skipped so far."""
        return self._num_steps

    @property
    def last_overflow_iter(self) -> int:
        """The number of the last step that overflowed, from 0; -1: none has."""
        return self._last_overflow

    def update(self, *, overflow: bool) -> str | None:
        """Choose the scale of the next step; return what to say about an overflow.

        Raises: EngineError after `max_overflows_at_minimum` overflows in a row that no smaller scale can cure.
        """
        said = None
        if overflow:
            said = self._after_overflow()
        else:
            self._after_good_step()
        self._num_steps += 1
        return said

    def _after_overflow(self) -> str:
        self._last_overflow = self._num_steps
        said = f"OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {self.scale:.12g}"
        if not self.rules.is_dynamic:
            self._count_at_minimum("the loss scale is fixed")
            return f"{said}, which is fixed"
        if self._hysteresis > 1:
            self._hysteresis -= 1
            return f"{said}, but hysteresis is {self._hysteresis + 1}. Reducing hysteresis to {self._hysteresis}"
        if self.scale <= self.rules.min_scale:
            self._count_at_minimum("the loss scale is at its minimum")
        self.scale = max(self.scale / FACTOR, self.rules.min_scale)
        return f"{said}, reducing to {self.scale:.12g}"

    def _count_at_minimum(self, what: str) -> None:
        self._overflows_at_minimum += 1
        num, limit = self._overflows_at_minimum, self.rules.max_overflows_at_minimum
        if limit is not None and num >= limit:
            steps = "1 step" if num == 1 else f"{num} steps in a row"
            remedy = "use bf16, which has the range of fp32, or fp32"
            raise EngineError(
                f"{what} ({self.scale:.12g}) and gradients overflowed in {steps}",
                hint=remedy if self.rules.is_dynamic else f'{remedy}; or a dynamic scale: "loss_scale": 0',
            )

    def _after_good_step(self) -> None:
        self._overflows_at_minimum = 0
        if not self.rules.is_dynamic:
            return
        num_good = self._num_steps - self._last_overflow - 1  # in a row before this one
        is_window_over = num_good > 0 and num_good % self.rules.window == 0
        if self.rules.consecutive_hysteresis or is_window_over:
            self._hysteresis = self.rules.hysteresis
        if is_window_over:
            self.scale *= FACTOR

    def state_dict(self) -> dict[str, float]:
        """Return what a continued run needs."""
        return {
            "scale": self.scale,
            "num_steps": self._num_steps,
            "last_overflow": self._last_overflow,
            "hysteresis": self._hysteresis,
            "overflows_at_minimum": self._overflows_at_minimum,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state_dict()`; a fixed scale stays what the config says."""
        if self.rules.is_dynamic:
            self.scale = float(state["scale"])
        self._num_steps = int(state["num_steps"])
        self._last_overflow = int(state["last_overflow"])
        self._hysteresis = int(state["hysteresis"])
        self._overflows_at_minimum = int(state.get("overflows_at_minimum", 0))  # DeepSpeed has no such count
