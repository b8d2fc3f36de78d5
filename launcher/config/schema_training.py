"""Precision, optimizers and schedules."""

from __future__ import annotations

from typing import Annotated, Any

from launcher.config.fields import (
    WORKS,
    AnyInt,
    Betas,
    Count,
    Flag,
    Fraction,
    Mapping_,
    NonNegative,
    Number,
    NumberOrList,
    OptInt,
    OptNumber,
    OptText,
    OptTextList,
    PositiveInt,
    Section,
    Text,
    choice,
    inert,
    key,
    unsupported,
)

_BF16 = unsupported("fp16 is not in this release; use bf16")


class Fp16(Section):
    """`fp16`: half precision with a loss scale."""

    status = inert("fp16 is off")
    switch = ("enabled", False)

    enabled: Flag = key(False, "train in fp16", _BF16)
    auto_cast: Flag = key(False, "cast the inputs to fp16")
    loss_scale: NonNegative = key(0, "fixed loss scale; 0: dynamic")
    initial_scale_power: Count = key(16, "the dynamic scale starts at 2 to this power")
    loss_scale_window: PositiveInt = key(1000, "good steps before the scale is doubled")
    hysteresis: PositiveInt = key(2, "overflows before the scale is halved")
    consecutive_hysteresis: Flag = key(False, "a good step forgets earlier overflows")
    min_loss_scale: NonNegative = key(1, "the scale never gets smaller")
    fp16_master_weights_and_grads: Flag = key(False, "keep master weights and gradients in fp16")


class Bf16(Section):
    """`bf16`: bfloat16 parameters, fp32 master weights and fp32 gradient sums."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "train in bf16 with fp32 master weights", WORKS)
    immediate_grad_update: Flag = key(False, "sum gradients as they come", inert("they always are"))
    check_grad_overflow: Flag = key(True, "skip a step whose gradients are not finite", inert("it is always done"))
    bf16_master_weights_and_grads: Flag = key(
        False,
        "keep master weights and gradients in bf16",
        unsupported("master weights are fp32; remove the key"),
    )
    bf16_optimizer_states: Flag = key(
        False, "keep optimizer states in bf16", unsupported("states are fp32; remove the key")
    )


class TorchAutocast(Section):
    """`torch_autocast`: torch's own mixed precision."""

    status = inert("torch_autocast is off")
    switch = ("enabled", False)

    enabled: Flag = key(False, "run the forward under torch.autocast", unsupported("use bf16"))
    dtype: OptText = key(None, "bfloat16 or float16")
    lower_precision_safe_modules: OptTextList = key(None, "class paths that run in lower precision")


class Amp(Section):
    """`amp`: the retired Apex mixed precision."""

    status = inert("amp is off")
    switch = ("enabled", False)

    enabled: Flag = key(False, "train with Apex", unsupported("use bf16"))
    opt_level: Text = key("O1", "O0 to O3")
    loss_scale: Annotated[Any, choice("dynamic")] = key("dynamic", "loss scale")


class DataTypes(Section):
    """`data_types`: precision of gradient sums, parameters and buffers."""

    grad_accum_dtype: Annotated[str | None, choice("fp32", "fp16", "bf16", null=True)] = key(
        None, "precision of gradient sums; null: fp32 here", WORKS
    )
    param_dtype: OptText = key(None, "must agree with fp16 or bf16", unsupported("use the bf16 section"))
    buffer_dtype: OptText = key(None, "precision of module buffers", unsupported("buffers follow the parameters"))


class Optimizer(Section):
    """`optimizer`: type and its parameters; `params` is checked against the type."""

    type: Text = key("AdamW", "Adam, AdamW, ...")
    params: Mapping_ = key({}, "parameters of the type")
    legacy_fusion: Flag = key(False, "old fused form", inert("it is obsolete"))


class Scheduler(Section):
    """`scheduler`: type and its parameters; `params` is checked against the type."""

    type: Text = key("WarmupLR", "WarmupLR, WarmupDecayLR, ...")
    params: Mapping_ = key({}, "parameters of the type")


# ---- parameters of optimizer types ----


class AdamParams(Section):
    """Parameters of Adam and AdamW."""

    lr: NonNegative = key(1e-3, "learning rate")
    betas: Betas = key([0.9, 0.999], "decay of the first and second moment")
    eps: NonNegative = key(1e-8, "added to the denominator")
    weight_decay: NonNegative = key(0.0, "weight decay")
    bias_correction: Flag = key(True, "correct the moments' start", unsupported("it is always on; remove the key"))
    amsgrad: Flag = key(False, "use the largest second moment so far")
    adam_w_mode: Flag = key(True, 'decouple weight decay: "Adam" means AdamW unless this is false')
    torch_adam: Flag = key(False, "use torch's kernel", inert("torch's fused kernel is always used"))
    set_grad_none: Flag = key(True, "drop gradients after a step", inert("they always are"))
    fp32_optimizer_states: Flag = key(True, "keep states in fp32", inert("they always are"))


class AdagradParams(Section):
    """Parameters of Adagrad."""

    lr: NonNegative = key(1e-2, "learning rate")
    eps: NonNegative = key(1e-10, "added to the denominator")
    weight_decay: NonNegative = key(0.0, "weight decay")


class LionParams(Section):
    """Parameters of Lion."""

    lr: NonNegative = key(1e-3, "learning rate")
    betas: Betas = key([0.9, 0.999], "interpolation of the update and of the momentum")
    weight_decay: NonNegative = key(0.0, "weight decay")


class LambParams(AdamParams):
    """Parameters of Lamb."""

    eps_inside_sqrt: Flag = key(False, "add eps under the root")
    max_coeff: Number = key(10.0, "largest trust ratio")
    min_coeff: Number = key(0.01, "smallest trust ratio")


class OneBitAdamParams(AdamParams):
    """Parameters of OneBitAdam."""

    freeze_step: Count = key(100_000, "first compressed step")
    cuda_aware: Flag = key(False, "MPI sends from device memory")
    comm_backend_name: Text = key("nccl", "backend of the compressed collective")


class ZeroOneAdamParams(AdamParams):
    """Parameters of ZeroOneAdam."""

    var_freeze_step: Count = key(100_000, "step that freezes the variance")
    var_update_scaler: PositiveInt = key(16, "interval of variance updates")
    local_step_scaler: PositiveInt = key(32_678, "growth of the local steps")
    local_step_clipper: PositiveInt = key(16, "most local steps")
    cuda_aware: Flag = key(False, "MPI sends from device memory")
    comm_backend_name: Text = key("nccl", "backend of the compressed collective")


class OneBitLambParams(LambParams):
    """Parameters of OneBitLamb."""

    freeze_step: Count = key(100_000, "first compressed step")
    cuda_aware: Flag = key(False, "MPI sends from device memory")
    comm_backend_name: Text = key("nccl", "backend of the compressed collective")
    coeff_beta: Fraction = key(0.9, "decay of the trust ratio")
    factor_max: Number = key(4.0, "largest change of the trust ratio")
    factor_min: Number = key(0.5, "smallest change of the trust ratio")
    factor_threshold: Number = key(0.1, "largest change in one step")


class MuonParams(Section):
    """Parameters of Muon."""

    lr: NonNegative = key(0.02, "learning rate")
    momentum: Fraction = key(0.95, "momentum")
    weight_decay: NonNegative = key(0.0, "weight decay")
    muon_lr: OptNumber = key(None, "learning rate of matrices")
    adam_lr: OptNumber = key(None, "learning rate of everything else")
    betas: Betas = key([0.9, 0.95], "betas of everything else")
    eps: NonNegative = key(1e-10, "eps of everything else")
    ns_method: Annotated[str, choice("gram", "standard")] = key("gram", "orthogonalisation")


class SgdParams(Section):
    """Parameters of SGD."""

    lr: NonNegative = key(1e-3, "learning rate")
    momentum: Fraction = key(0.0, "momentum")
    dampening: Number = key(0.0, "dampening of the momentum")
    weight_decay: NonNegative = key(0.0, "weight decay")
    nesterov: Flag = key(False, "Nesterov momentum")


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
    "MuAdam": AdamParams,
    "MuAdamW": AdamParams,
    "MuSGD": SgdParams,
    "SGD": SgdParams,
}
WORKING_OPTIMIZERS = ("Adam", "AdamW")

# ---- parameters of schedule types ----


class WarmupLRParams(Section):
    """Parameters of WarmupLR."""

    warmup_min_lr: NumberOrList = key(0.0, "first learning rate")
    warmup_max_lr: NumberOrList = key(None, "learning rate after the warm-up; null: the optimizer's")
    warmup_num_steps: Count = key(1000, "steps of the warm-up")
    warmup_type: Annotated[str, choice("log", "linear")] = key("log", "form of the rise")


class WarmupDecayLRParams(WarmupLRParams):
    """Parameters of WarmupDecayLR."""

    total_num_steps: PositiveInt = key(..., "steps of the whole training")
    warmup_max_lr: NumberOrList = key(0.001, "learning rate after the warm-up; null: the optimizer's")


class WarmupCosineLRParams(Section):
    """Parameters of WarmupCosineLR."""

    total_num_steps: PositiveInt = key(..., "steps of the whole training")
    warmup_min_ratio: Fraction = key(0.0, "first learning rate, as part of the optimizer's")
    warmup_num_steps: Count = key(1000, "steps of the warm-up")
    cos_min_ratio: Fraction = key(0.0001, "last learning rate, as part of the optimizer's")
    warmup_type: Annotated[str, choice("log", "linear")] = key("log", "form of the rise")


class LRRangeTestParams(Section):
    """Parameters of LRRangeTest."""

    lr_range_test_min_lr: NumberOrList = key(1e-3, "first learning rate")
    lr_range_test_step_size: PositiveInt = key(2000, "steps of one interval")
    lr_range_test_step_rate: Number = key(1.0, "growth in one interval")
    lr_range_test_staircase: Flag = key(False, "grow in steps")


class OneCycleParams(Section):
    """Parameters of OneCycle."""

    cycle_min_lr: NonNegative = key(..., "lowest learning rate of the cycle")
    cycle_max_lr: NonNegative = key(..., "highest learning rate of the cycle")
    decay_lr_rate: NonNegative = key(0.0, "decay after the cycle")
    cycle_first_step_size: PositiveInt = key(2000, "steps of the rise")
    cycle_second_step_size: OptInt = key(None, "steps of the fall; null: as the rise")
    cycle_first_stair_count: Count = key(0, "stairs of the rise")
    cycle_second_stair_count: OptInt = key(None, "stairs of the fall; null: as the rise")
    decay_step_size: Count = key(0, "steps of one decay interval")
    cycle_momentum: Flag = key(True, "let the momentum cycle too")
    cycle_min_mom: Fraction = key(0.8, "lowest momentum")
    cycle_max_mom: Fraction = key(0.9, "highest momentum")
    decay_mom_rate: NonNegative = key(0.0, "momentum decay after the cycle")
    last_batch_iteration: AnyInt = key(-1, "step to continue from")


SCHEDULER_PARAMS: dict[str, type[Section]] = {
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
}
WORKING_SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
