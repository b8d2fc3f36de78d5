"""Learning-rate schedules of the DeepSpeed vocabulary: a pure formula per type, one class that applies it.

A schedule counts optimizer steps in `t`, from -1 before the first one. The engine calls `step()` once
after each optimizer step, so the first optimizer step runs at the rate of t = -1, the second at t = 0,
as scripts written for DeepSpeed expect. Formulas: DeepSpeed's documentation of "Learning Rate Schedulers".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.base.errors import ConfigError
from launcher.base.log import get_logger
from launcher.base.suggest import did_you_mean

# (t, base learning rate of the group, index of the group) -> learning rate
LearningRate = Callable[[int, float, int], float]
# t -> momentum, or first beta
Momentum = Callable[[int], float]


@dataclass(frozen=True)
class Warmup:
    """The rising part shared by all warm-up schedules: a gain that goes from 0 to 1 over `num_steps`."""

    num_steps: int
    warmup_type: str  # "log" or "linear"

    def __post_init__(self) -> None:
        if self.warmup_type not in ("log", "linear"):
            hint = did_you_mean(self.warmup_type, ("log", "linear")) or 'expected "log" or "linear"'
            raise ConfigError(f'unknown warmup_type "{self.warmup_type}"', where="scheduler.params", hint=hint)
        # A logarithm to base 1 does not exist: two steps is the shortest warm-up.
        object.__setattr__(self, "num_steps", max(2, self.num_steps))

    def gain(self, t: int) -> float:
        """Return the gain for 0 <= t < num_steps, 1 after it."""
        if t >= self.num_steps:
            return 1.0
        if self.warmup_type == "log":
            return math.log(t + 1) / math.log(self.num_steps)
        return t / self.num_steps


def _per_group(value: float | Sequence[float], index: int) -> float:
    return float(value[index]) if isinstance(value, Sequence) else float(value)


def warmup_lr(
    *,
    warmup_min_lr: float | Sequence[float] = 0.0,
    warmup_max_lr: float | Sequence[float] | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> LearningRate:
    """Rise from `warmup_min_lr` to `warmup_max_lr` (None: the optimizer's lr), then stay."""
    warmup = Warmup(warmup_num_steps, warmup_type)

    def learning_rate(t: int, base_lr: float, index: int) -> float:
        low = _per_group(warmup_min_lr, index)
        high = base_lr if warmup_max_lr is None else _per_group(warmup_max_lr, index)
        return low if t < 0 else low + (high - low) * warmup.gain(t)

    return learning_rate


def warmup_decay_lr(
    *,
    total_num_steps: int,
    warmup_min_lr: float | Sequence[float] = 0.0,
    warmup_max_lr: float | Sequence[float] | None = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
) -> LearningRate:
    """Rise as WarmupLR, then fall linearly to `warmup_min_lr` at `total_num_steps`."""
    warmup = Warmup(warmup_num_steps, warmup_type)
    decay_steps = max(1, total_num_steps - warmup.num_steps)

    def learning_rate(t: int, base_lr: float, index: int) -> float:
        low = _per_group(warmup_min_lr, index)
        high = base_lr if warmup_max_lr is None else _per_group(warmup_max_lr, index)
        if t < 0:
            return low
        gain = warmup.gain(t) if t < warmup.num_steps else max(0.0, (total_num_steps - t) / decay_steps)
        return low + (high - low) * gain

    return learning_rate


def warmup_cosine_lr(
    *,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
) -> LearningRate:
    """Rise from `warmup_min_ratio` to 1, then fall on a half cosine to `cos_min_ratio`, times the base lr."""
    warmup = Warmup(warmup_num_steps, warmup_type)
    decay_steps = max(1, total_num_steps - warmup.num_steps)

    def ratio(t: int) -> float:
        if t < 0:
            return 0.0
        if t < warmup.num_steps:
            return warmup_min_ratio + (1.0 - warmup_min_ratio) * warmup.gain(t)
        progress = min(1.0, (t - warmup.num_steps + 1) / decay_steps)
        cosine = (1.0 + math.cos(math.pi * progress)) / 2.0
        return max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * cosine)

    return lambda t, base_lr, index: base_lr * ratio(t)


def lr_range_test(
    *,
    lr_range_test_min_lr: float | Sequence[float] = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> LearningRate:
    """Rise without end from `lr_range_test_min_lr`, by `step_rate` times it in each interval of `step_size` steps."""

    def learning_rate(t: int, base_lr: float, index: int) -> float:
        num_intervals = (t + 1) / lr_range_test_step_size
        if lr_range_test_staircase:
            num_intervals = math.floor(num_intervals)
        return _per_group(lr_range_test_min_lr, index) * (1.0 + lr_range_test_step_rate * num_intervals)

    return learning_rate


@dataclass(frozen=True)
class Cycle:
    """The shape of OneCycle: up in `first` steps, down in `second`, then decay."""

    first: int
    second: int
    first_stairs: int  # 0: no stairs
    second_stairs: int
    decay_step_size: int  # 0: no decay

    @property
    def total(self) -> int:
        return self.first + self.second

    def height(self, t: int) -> float:
        """Return 0 at the ends of the cycle, 1 at its top; for t < total."""
        position = (t + 1) % self.total
        is_rising = position <= self.first
        stairs = self.first_stairs if is_rising else self.second_stairs
        done, size = (position, self.first) if is_rising else (self.total - position, self.second)
        return done * stairs // size / stairs if stairs else done / size

    def num_decays(self, t: int) -> float:
        """Return how many decay intervals have passed; for t >= total."""
        return (t - self.total + 1) / self.decay_step_size if self.decay_step_size else 0.0


def one_cycle(
    *,
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
) -> tuple[LearningRate, Momentum | None]:
    """Cycle the rate once from low to high and back, the momentum the other way, then let both decay."""
    cycle = Cycle(
        cycle_first_step_size,
        cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size,
        cycle_first_stair_count,
        cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count,
        decay_step_size,
    )

    def learning_rate(t: int, base_lr: float, index: int) -> float:
        if t >= cycle.total:
            return cycle_min_lr / (1.0 + decay_lr_rate * cycle.num_decays(t))
        return cycle_min_lr + (cycle_max_lr - cycle_min_lr) * cycle.height(t)

    def momentum(t: int) -> float:
        if t < 0:
            return cycle_min_mom  # DeepSpeed's first step runs at the lower end, against the direction of the cycle
        if t >= cycle.total:
            return cycle_max_mom * (1.0 + decay_mom_rate * cycle.num_decays(t))
        return cycle_max_mom - (cycle_max_mom - cycle_min_mom) * cycle.height(t)

    return learning_rate, momentum if cycle_momentum else None


SCHEDULES: dict[str, Callable[..., LearningRate | tuple[LearningRate, Momentum | None]]] = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
    "LRRangeTest": lr_range_test,
    "OneCycle": one_cycle,
}
CYCLED_SECOND_BETA = 0.99  # OneCycle's, while it cycles the first one


class LRSchedule:
    """Writes `lr`, and the momentum where one is cycled, into every parameter group.

    It does so at construction and after each optimizer step.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        param_groups: list[dict[str, Any]],
        base_lr: float,
        momentum: Momentum | None = None,
        last_batch_iteration: int = -1,
    ) -> None:
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._param_groups = param_groups
        self._base_lrs = [float(group.get("lr", base_lr)) for group in param_groups]
        self.last_batch_iteration = last_batch_iteration
        self._apply()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at the current step."""
        t = self.last_batch_iteration
        return [self._learning_rate(t, base, index) for index, base in enumerate(self._base_lrs)]

    def get_mom(self) -> float | None:
        """Return the momentum at the current step; None when it is not cycled."""
        return None if self._momentum is None else self._momentum(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates last written into the groups."""
        return list(self._last_lrs)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance by one optimizer step, or jump to `last_batch_iteration`, and write the new rates."""
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._apply()

    def state_dict(self) -> dict[str, int]:
        """Return `{"last_batch_iteration": t}`; everything else comes from the config."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a state of `state_dict()`, writing its rates at once."""
        self.step(state["last_batch_iteration"])

    def _apply(self) -> None:
        self._last_lrs = self.get_lr()
        momentum = self.get_mom()
        for group, rate in zip(self._param_groups, self._last_lrs, strict=True):
            group["lr"] = rate
            if momentum is None:
                continue
            if "betas" in group:
                group["betas"] = (momentum, CYCLED_SECOND_BETA)
            elif group.get("momentum"):
                group["momentum"] = momentum


def build_schedule(
    type_name: str, params: Mapping[str, Any], param_groups: list[dict[str, Any]], base_lr: float
) -> LRSchedule:
    """Build the schedule named `type_name` over `param_groups`, whose `lr` it owns from now on.

    `base_lr` serves the groups that carry no `lr` of their own.

    Raises: ConfigError for an unknown type or parameter, a missing one, or a training of 0 steps.
    """
    options = dict(params)
    if options.get("total_num_steps") == 0:  # transformers' Trainer writes it where it only evaluates
        raise ConfigError(
            f"{type_name}: a training of 0 steps has no learning rate",
            where="scheduler.params.total_num_steps",
            hint="state the number of optimizer steps",
        )
    last_batch_iteration = options.pop("last_batch_iteration", -1)
    learning_rate, momentum = formulas_of(type_name, options, param_groups)
    return LRSchedule(learning_rate, param_groups, base_lr, momentum, last_batch_iteration)


def formulas_of(
    type_name: str, params: Mapping[str, Any], param_groups: list[dict[str, Any]]
) -> tuple[LearningRate, Momentum | None]:
    """Return the learning rate and the momentum, None for none, of a schedule over `param_groups`.

    Raises: as `build_schedule`.
    """
    factory = SCHEDULES.get(type_name)
    if factory is None:
        hint = did_you_mean(type_name, SCHEDULES) or f"expected one of {', '.join(SCHEDULES)}"
        raise ConfigError(f'unknown scheduler type "{type_name}"', where="scheduler.type", hint=hint)
    try:
        built = factory(**params)
    except TypeError as error:
        message = str(error).split("() ", 1)[-1]
        raise ConfigError(f"{type_name}: {message}", where="scheduler.params") from error
    learning_rate, momentum = built if isinstance(built, tuple) else (built, None)
    if momentum is not None and not any("betas" in group or group.get("momentum") for group in param_groups):
        get_logger().warning("scheduler.params.cycle_momentum has no effect: the optimizer has no momentum")
        momentum = None
    return learning_rate, momentum
