"""The params of each type of optimizer and schedule: names and defaults are DeepSpeed's, of torch's types torch's."""

from __future__ import annotations

from typing import Annotated

from launcher.config.fields import (
    AnyInt,
    Betas,
    Count,
    CountList,
    Flag,
    Fraction,
    NonNegative,
    Number,
    NumberOrList,
    OptCount,
    OptFlag,
    OptInt,
    OptNumber,
    PerGroup,
    PositiveInt,
    Section,
    Text,
    choice,
    inert,
    key,
    unsupported,
)

# ---- Optimizers ----


TORCHS_WEIGHT_DECAY = 0.01  # the default of torch.optim.AdamW, which torch_adam builds
_FLAT = inert("a shard is one flat tensor, and torch's fused kernel updates it where there is one")
_IN_FP32 = inert("they always are")


class AdamParams(Section):
    """Parameters of Adam and AdamW."""

    lr: NonNegative = key(1e-3, "learning rate")
    betas: Betas = key([0.9, 0.999], "decay of the first and second moment")
    eps: NonNegative = key(1e-8, "added to the denominator")
    weight_decay: NonNegative = key(0.0, "weight decay; 0.01 where torch_adam makes it torch's AdamW")
    bias_correction: Flag = key(True, "correct the moments' start")
    amsgrad: Flag = key(False, "use the largest second moment so far")
    maximize: Flag = key(False, "go up the gradient")
    adam_w_mode: Flag = key(True, 'decouple weight decay: "Adam" means AdamW unless this is false')
    torch_adam: Flag = key(False, "use torch's optimizer instead of the engine's kernel")
    foreach: OptFlag = key(None, "torch's updates of many tensors at once", _FLAT)
    fused: OptFlag = key(None, "torch's fused kernel", _FLAT)
    capturable: Flag = key(False, "steps may be in a CUDA graph", inert("no graphs are recorded"))
    differentiable: Flag = key(False, "keep the graph of a step", unsupported("steps have no graph; remove the key"))
    set_grad_none: Flag = key(True, "drop gradients after a step", inert("they always are"))
    fp32_optimizer_states: Flag = key(True, "keep states in fp32", _IN_FP32)


class AdagradParams(Section):
    """Parameters of Adagrad."""

    lr: NonNegative = key(1e-2, "learning rate")
    eps: NonNegative = key(1e-10, "added to the denominator")
    weight_decay: NonNegative = key(0.0, "weight decay")
    lr_decay: NonNegative = key(0.0, "the rate is divided by 1 + this times the steps taken")
    initial_accumulator_value: NonNegative = key(0.0, "first sum of squares")
    amsgrad: Flag = key(False, "of Adam", unsupported("Adagrad has no such form; remove the key"))
    fp32_optimizer_states: Flag = key(True, "keep states in fp32", _IN_FP32)


class LionParams(Section):
    """Parameters of Lion."""

    lr: NonNegative = key(1e-3, "learning rate")
    betas: Betas = key([0.9, 0.999], "interpolation of the update and of the momentum")
    weight_decay: NonNegative = key(0.0, "weight decay")
    set_grad_none: Flag = key(True, "drop gradients after a step", inert("they always are"))
    fp32_optimizer_states: Flag = key(True, "keep states in fp32", _IN_FP32)


class LambParams(Section):
    """Parameters of Lamb."""

    lr: NonNegative = key(1e-3, "learning rate")
    bias_correction: Flag = key(True, "correct the moments' start")
    betas: Betas = key([0.9, 0.999], "decay of the first and second moment")
    eps: NonNegative = key(1e-8, "added to the denominator")
    weight_decay: NonNegative = key(0.0, "weight decay")
    amsgrad: Flag = key(False, "use the largest second moment so far", unsupported("LAMB has no such form"))
    set_grad_none: Flag = key(True, "drop gradients after a step", inert("they always are"))
    eps_inside_sqrt: Flag = key(False, "add eps under the root")
    max_coeff: Number = key(10.0, "largest trust ratio")
    min_coeff: Number = key(0.01, "smallest trust ratio")


_ANY_BACKEND = inert("signs travel through the engine's own collectives, on any backend")


class OneBitParams(Section):
    """What the optimizers with one-bit communication share."""

    lr: NonNegative = key(1e-3, "learning rate")
    betas: Betas = key([0.9, 0.999], "decay of the first and second moment")
    eps: NonNegative = key(1e-8, "added to the denominator")
    weight_decay: NonNegative = key(0.0, "decoupled weight decay")
    bias_correction: Flag = key(True, "correct the moments' start")
    amsgrad: Flag = key(False, "largest second moment so far", unsupported("the variance is frozen; remove the key"))
    cuda_aware: Flag = key(False, "MPI sends from device memory", _ANY_BACKEND)
    comm_backend_name: Text = key("nccl", "backend of the compressed collective", _ANY_BACKEND)


class OneBitAdamParams(OneBitParams):
    """Parameters of OneBitAdam."""

    freeze_step: PositiveInt = key(100_000, "steps of AdamW before compression")


class ZeroOneAdamParams(OneBitParams):
    """Parameters of ZeroOneAdam."""

    var_freeze_step: PositiveInt = key(100_000, "steps before the variance is frozen and ranks step by themselves")
    var_update_scaler: PositiveInt = key(16, "variance updates after which their interval doubles")
    local_step_scaler: PositiveInt = key(32_678, "local steps after which the interval of exchanges doubles")
    local_step_clipper: PositiveInt = key(16, "longest interval of exchanges, in steps")


class OneBitLambParams(OneBitParams):
    """Parameters of OneBitLamb."""

    freeze_step: PositiveInt = key(100_000, "steps of LAMB before compression")
    eps_inside_sqrt: Flag = key(False, "add eps under the root")
    max_coeff: Number = key(10.0, "largest trust ratio")
    min_coeff: Number = key(0.01, "smallest trust ratio")
    coeff_beta: Fraction = key(0.9, "decay of the mean trust ratio")
    factor_max: Number = key(4.0, "largest factor of the frozen trust ratio")
    factor_min: Number = key(0.5, "smallest factor of the frozen trust ratio")
    factor_threshold: Number = key(0.1, "largest relative change of the factor in one step")


class MuonParams(Section):
    """Parameters of Muon."""

    lr: OptNumber = key(None, "learning rate; null: 0.02 for matrices, 3e-4 for everything else")
    momentum: Fraction = key(0.95, "momentum of matrices")
    weight_decay: NonNegative = key(0.0, "decoupled weight decay")
    muon_lr: OptNumber = key(None, "learning rate of matrices instead of `lr`")
    adam_lr: OptNumber = key(None, "learning rate of everything else instead of `lr`")
    betas: Betas = key([0.9, 0.95], "betas of everything else")
    eps: NonNegative = key(1e-10, "eps of everything else")
    ns_method: Annotated[str, choice("gram", "standard")] = key(
        "gram", "Newton-Schulz iteration: on the Gram matrix, quicker where matrices are not square, or the original"
    )
    fp32_optimizer_states: Flag = key(True, "keep states in fp32", _IN_FP32)


class SgdParams(Section):
    """Parameters of SGD."""

    lr: NonNegative = key(1e-3, "learning rate")
    momentum: Fraction = key(0.0, "momentum")
    dampening: Number = key(0.0, "dampening of the momentum")
    weight_decay: NonNegative = key(0.0, "weight decay")
    nesterov: Flag = key(False, "Nesterov momentum")


class RmspropParams(Section):
    """Parameters of RMSprop."""

    lr: NonNegative = key(1e-2, "learning rate")
    alpha: Fraction = key(0.99, "decay of the mean square")
    eps: NonNegative = key(1e-8, "added to the denominator")
    weight_decay: NonNegative = key(0.0, "weight decay")
    momentum: Fraction = key(0.0, "momentum")
    centered: Flag = key(False, "subtract the square of the mean gradient")


class NAdamParams(Section):
    """Parameters of NAdam."""

    lr: NonNegative = key(2e-3, "learning rate")
    betas: Betas = key([0.9, 0.999], "decay of the first and second moment")
    eps: NonNegative = key(1e-8, "added to the denominator")
    weight_decay: NonNegative = key(0.0, "weight decay")
    momentum_decay: NonNegative = key(4e-3, "decay of the Nesterov momentum")
    decoupled_weight_decay: Flag = key(False, "decay weights as AdamW does")


class RAdamParams(Section):
    """Parameters of RAdam."""

    lr: NonNegative = key(1e-3, "learning rate")
    betas: Betas = key([0.9, 0.999], "decay of the first and second moment")
    eps: NonNegative = key(1e-8, "added to the denominator")
    weight_decay: NonNegative = key(0.0, "weight decay")
    decoupled_weight_decay: Flag = key(False, "decay weights as AdamW does")


class AdamaxParams(Section):
    """Parameters of Adamax."""

    lr: NonNegative = key(2e-3, "learning rate")
    betas: Betas = key([0.9, 0.999], "decay of the first moment and of the largest gradient")
    eps: NonNegative = key(1e-8, "added to the denominator")
    weight_decay: NonNegative = key(0.0, "weight decay")


class AsgdParams(Section):
    """Parameters of ASGD."""

    lr: NonNegative = key(1e-2, "learning rate")
    lambd: NonNegative = key(1e-4, "decay")
    alpha: NonNegative = key(0.75, "power of the rate's fall")
    t0: NonNegative = key(1e6, "step at which averaging starts")
    weight_decay: NonNegative = key(0.0, "weight decay")


class AdadeltaParams(Section):
    """Parameters of Adadelta."""

    lr: NonNegative = key(1.0, "learning rate")
    rho: Fraction = key(0.9, "decay of the mean squares")
    eps: NonNegative = key(1e-6, "added under the roots")
    weight_decay: NonNegative = key(0.0, "weight decay")


class RpropParams(Section):
    """Parameters of Rprop."""

    lr: NonNegative = key(1e-2, "first step size")
    etas: NumberOrList = key([0.5, 1.2], "shrinking and growth of step sizes")
    step_sizes: NumberOrList = key([1e-6, 50.0], "smallest and largest step size")


class MuAdamParams(Section):
    """Parameters of MuAdam and MuAdamW."""

    lr: NonNegative = key(1e-3, "learning rate at the width of the base model")
    betas: Betas = key([0.9, 0.999], "decay of the first and second moment")
    eps: NonNegative = key(1e-8, "added to the denominator")
    weight_decay: NonNegative = key(0.0, "weight decay")
    amsgrad: Flag = key(False, "use the largest second moment so far")


OPTIMIZER_PARAMS: dict[str, type[Section]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "Adagrad": AdagradParams,
    "Lamb": LambParams,
    "Lion": LionParams,
    "OneBitAdam": OneBitAdamParams,
    "ZeroOneAdam": ZeroOneAdamParams,
    "OneBitLamb": OneBitLambParams,
    "Muon": MuonParams,
    "MuAdam": MuAdamParams,
    "MuAdamW": MuAdamParams,
    "MuSGD": SgdParams,
    "SGD": SgdParams,
    "RMSprop": RmspropParams,
    "NAdam": NAdamParams,
    "RAdam": RAdamParams,
    "Adamax": AdamaxParams,
    "ASGD": AsgdParams,
    "Adadelta": AdadeltaParams,
    "Rprop": RpropParams,
}
WORKING_OPTIMIZERS = (
    "Adam", "AdamW", "Adagrad", "Lamb", "Lion", "SGD",
    "RMSprop", "NAdam", "RAdam", "Adamax", "ASGD", "Adadelta", "Rprop",
    "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Muon", "MuAdam", "MuAdamW", "MuSGD",
)  # fmt: skip
# Their ranks exchange signs of momenta: stage 0 only.
ONE_BIT_OPTIMIZERS = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
_WHOLE = "; pass it as an object under stage 0, or use an elementwise one such as AdamW or Lion"
# Why a type is refused, and what to do.
REFUSED_OPTIMIZERS = {
    "Adafactor": "it keeps sums of whole rows and columns" + _WHOLE,
    "LBFGS": "it evaluates the loss again inside its step; use AdamW",
    "SparseAdam": "gradients are summed dense; use Adam",
}


# ---- Learning-rate schedules ----


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
