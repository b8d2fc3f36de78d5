"""Parameters of learning-rate schedules: DeepSpeed's, and those of torch.optim.lr_scheduler."""

from __future__ import annotations

from typing import Annotated

from launcher.config.fields import (
    AnyInt,
    Count,
    CountList,
    Flag,
    Fraction,
    NonNegative,
    Number,
    NumberOrList,
    OptCount,
    OptInt,
    PerGroup,
    PositiveInt,
    Section,
    Text,
    choice,
    key,
)


class DeepSpeedScheduleParams(Section):
    """What DeepSpeed's schedules share."""

    last_batch_iteration: AnyInt = key(-1, "step to continue from")


class WarmupLRParams(DeepSpeedScheduleParams):
    """Parameters of WarmupLR."""

    warmup_min_lr: NumberOrList = key(0.0, "first learning rate")
    warmup_max_lr: NumberOrList = key(None, "learning rate after the warm-up; null: the optimizer's")
    warmup_num_steps: Count = key(1000, "steps of the warm-up")
    warmup_type: Text = key("log", 'form of the rise: "log" or "linear"; another is said at start, and "log" used')


class WarmupDecayLRParams(WarmupLRParams):
    """Parameters of WarmupDecayLR."""

    total_num_steps: NonNegative = key(..., "steps of the whole training; 0 only where nothing is trained")
    warmup_max_lr: NumberOrList = key(0.001, "learning rate after the warm-up; null: the optimizer's")


class WarmupCosineLRParams(DeepSpeedScheduleParams):
    """Parameters of WarmupCosineLR."""

    total_num_steps: NonNegative = key(..., "steps of the whole training; 0 only where nothing is trained")
    warmup_min_ratio: Fraction = key(0.0, "first learning rate, as part of the optimizer's")
    warmup_num_steps: Count = key(1000, "steps of the warm-up")
    cos_min_ratio: Fraction = key(0.0001, "last learning rate, as part of the optimizer's")
    warmup_type: Text = key("log", 'form of the rise: "log" or "linear"; another is said at start, and "log" used')


class LRRangeTestParams(DeepSpeedScheduleParams):
    """Parameters of LRRangeTest."""

    lr_range_test_min_lr: NumberOrList = key(1e-3, "first learning rate")
    lr_range_test_step_size: PositiveInt = key(2000, "steps of one interval")
    lr_range_test_step_rate: Number = key(1.0, "growth in one interval")
    lr_range_test_staircase: Flag = key(False, "grow in steps")


class OneCycleParams(DeepSpeedScheduleParams):
    """Parameters of OneCycle."""

    cycle_min_lr: PerGroup = key(..., "lowest learning rate of the cycle")
    cycle_max_lr: PerGroup = key(..., "highest learning rate of the cycle")
    decay_lr_rate: NonNegative = key(0.0, "decay after the cycle")
    cycle_first_step_size: PositiveInt = key(2000, "steps of the rise")
    cycle_second_step_size: OptCount = key(None, "steps of the fall; null: as the rise")
    cycle_first_stair_count: Count = key(0, "stairs of the rise")
    cycle_second_stair_count: OptCount = key(None, "stairs of the fall; null: as the rise")
    decay_step_size: Count = key(0, "steps of one decay interval")
    cycle_momentum: Flag = key(True, "let the momentum cycle too")
    cycle_min_mom: PerGroup = key(0.8, "lowest momentum")
    cycle_max_mom: PerGroup = key(0.9, "highest momentum")
    decay_mom_rate: NonNegative = key(0.0, "momentum decay after the cycle")


class StepLRParams(Section):
    """Parameters of StepLR."""

    step_size: PositiveInt = key(..., "steps between falls")
    gamma: NonNegative = key(0.1, "factor of a fall")


class MultiStepLRParams(Section):
    """Parameters of MultiStepLR."""

    milestones: CountList = key(..., "steps of the falls")
    gamma: NonNegative = key(0.1, "factor of a fall")


class ConstantLRParams(Section):
    """Parameters of ConstantLR."""

    factor: Fraction = key(1 / 3, "part of the optimizer's rate at first")
    total_iters: Count = key(5, "steps until the whole rate")


class LinearLRParams(Section):
    """Parameters of LinearLR."""

    start_factor: Fraction = key(1 / 3, "part of the optimizer's rate at first")
    end_factor: Fraction = key(1.0, "part of it at the end")
    total_iters: PositiveInt = key(5, "steps between both")


class ExponentialLRParams(Section):
    """Parameters of ExponentialLR."""

    gamma: NonNegative = key(..., "factor of each step")


class PolynomialLRParams(Section):
    """Parameters of PolynomialLR."""

    total_iters: PositiveInt = key(5, "steps until zero")
    power: Number = key(1.0, "power of the fall")


class CosineAnnealingLRParams(Section):
    """Parameters of CosineAnnealingLR."""

    T_max: PositiveInt = key(..., "steps of the fall")
    eta_min: NonNegative = key(0.0, "lowest learning rate")


class CosineAnnealingWarmRestartsParams(Section):
    """Parameters of CosineAnnealingWarmRestarts."""

    T_0: PositiveInt = key(..., "steps until the first restart")
    T_mult: PositiveInt = key(1, "growth of that number")
    eta_min: NonNegative = key(0.0, "lowest learning rate")


class CyclicLRParams(Section):
    """Parameters of CyclicLR."""

    base_lr: NumberOrList = key(..., "lowest learning rate")
    max_lr: NumberOrList = key(..., "highest learning rate")
    step_size_up: PositiveInt = key(2000, "steps of the rise")
    step_size_down: OptInt = key(None, "steps of the fall; null: as the rise")
    mode: Annotated[str, choice("triangular", "triangular2", "exp_range")] = key("triangular", "how cycles shrink")
    gamma: NonNegative = key(1.0, "factor of exp_range")
    cycle_momentum: Flag = key(True, "let the momentum cycle too")
    base_momentum: Fraction = key(0.8, "lowest momentum")
    max_momentum: Fraction = key(0.9, "highest momentum")


class OneCycleLRParams(Section):
    """Parameters of OneCycleLR, torch's own one-cycle policy."""

    max_lr: NumberOrList = key(..., "highest learning rate")
    total_steps: OptInt = key(None, "steps of the cycle; null: epochs times steps_per_epoch")
    epochs: OptInt = key(None, "epochs of the cycle")
    steps_per_epoch: OptInt = key(None, "steps of an epoch")
    pct_start: Fraction = key(0.3, "part of the cycle that rises")
    anneal_strategy: Annotated[str, choice("cos", "linear")] = key("cos", "form of the changes")
    cycle_momentum: Flag = key(True, "let the momentum cycle too")
    base_momentum: NumberOrList = key(0.85, "lowest momentum")
    max_momentum: NumberOrList = key(0.95, "highest momentum")
    div_factor: NonNegative = key(25.0, "the first rate is the highest divided by this")
    final_div_factor: NonNegative = key(1e4, "the last rate is the first divided by this")
    three_phase: Flag = key(False, "fall back to the first rate before the last phase")


TORCH_SCHEDULER_PARAMS: dict[str, type[Section]] = {
    "StepLR": StepLRParams,
    "MultiStepLR": MultiStepLRParams,
    "ConstantLR": ConstantLRParams,
    "LinearLR": LinearLRParams,
    "ExponentialLR": ExponentialLRParams,
    "PolynomialLR": PolynomialLRParams,
    "CosineAnnealingLR": CosineAnnealingLRParams,
    "CosineAnnealingWarmRestarts": CosineAnnealingWarmRestartsParams,
    "CyclicLR": CyclicLRParams,
    "OneCycleLR": OneCycleLRParams,
}
SCHEDULER_PARAMS: dict[str, type[Section]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    **TORCH_SCHEDULER_PARAMS,
}
WORKING_SCHEDULERS = tuple(SCHEDULER_PARAMS)
_FUNCTION = (
    "it needs a function, which a config cannot hold; initialize(lr_scheduler=lambda optimizer: {}(optimizer, ...))"
)
# Why a type is refused, and what to do.
REFUSED_SCHEDULERS = {
    "LambdaLR": _FUNCTION.format("LambdaLR"),
    "MultiplicativeLR": _FUNCTION.format("MultiplicativeLR"),
    "SequentialLR": "it is made of schedules; build it in initialize(lr_scheduler=lambda optimizer: SequentialLR(...))",
    "ChainedScheduler": "it is made of schedules; build it in initialize(lr_scheduler=lambda optimizer: ...)",
    "ReduceLROnPlateau": "it needs a metric; build it on the optimizer that initialize() returns and call step(metric)",
}
