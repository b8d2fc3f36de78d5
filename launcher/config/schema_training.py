"""Precision, and the sections that name an optimizer and a schedule."""

from __future__ import annotations

from typing import Annotated

from launcher.config.fields import (
    WORKS,
    Count,
    Flag,
    LossScaleValue,
    Mapping_,
    NonNegative,
    OptTextList,
    PositiveInt,
    Section,
    Text,
    choice,
    inert,
    key,
)


class Fp16(Section):
    """`fp16`: half precision with fp32 master weights, fp32 gradient sums and a loss scale."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "train in fp16 with fp32 master weights")
    auto_cast: Flag = key(False, "cast floating-point inputs to fp16")
    loss_scale: NonNegative = key(0, "fixed loss scale; 0: dynamic")
    initial_scale_power: Count = key(16, "the dynamic scale starts at 2 to this power")
    loss_scale_window: PositiveInt = key(1000, "good steps before one that doubles the scale")
    hysteresis: PositiveInt = key(2, "overflows before the scale is halved; at stage 0 the first one does it")
    consecutive_hysteresis: Flag = key(False, "a good step forgets earlier overflows")
    min_loss_scale: NonNegative = key(1, "the scale never gets smaller")
    fp16_master_weights_and_grads: Flag = key(False, "keep master weights and gradients in fp16; states stay fp32")


class Bf16(Section):
    """`bf16`: bfloat16 parameters, fp32 master weights and fp32 gradient sums."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "train in bf16 with fp32 master weights", WORKS)
    immediate_grad_update: Flag = key(False, "sum gradients as they come", inert("they always are"))
    check_grad_overflow: Flag = key(True, "skip a step whose gradients are not finite")
    bf16_master_weights_and_grads: Flag = key(False, "keep master weights and gradients in bf16")
    bf16_optimizer_states: Flag = key(False, "keep optimizer states in bf16, as the master weights then are")


# Names of the types that torch.autocast casts to.
_BFLOAT16 = ("bfloat16", "bf16", "torch.bfloat16")
FLOAT16 = ("float16", "fp16", "half", "torch.float16")


class TorchAutocast(Section):
    """`torch_autocast`: torch's own mixed precision over an fp32 model, or one in bf16."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "run the forward under torch.autocast; float16 with a dynamic loss scale")
    dtype: Annotated[str | None, choice(*_BFLOAT16, *FLOAT16, null=True)] = key(
        None, "what it casts to; null: bfloat16"
    )
    lower_precision_safe_modules: OptTextList = key(
        None, "class paths that may compute in lower precision; null: all, as torch decides"
    )


class Amp(Section):
    """`amp`: the mixed precision of Apex, which is retired; torch.autocast does it here."""

    switch = ("enabled", False)

    enabled: Flag = key(False, "run the forward under torch.autocast in fp16, with a loss scale")
    opt_level: Annotated[str, choice("O0", "O1", "O2", "O3")] = key("O1", "O0: fp32; O1 and O2: autocast; O3: refused")
    loss_scale: LossScaleValue = key("dynamic", '"dynamic" or a fixed loss scale')


class DataTypes(Section):
    """`data_types`: precision of gradient sums, parameters and buffers."""

    grad_accum_dtype: Annotated[str | None, choice("fp32", "fp16", "bf16", null=True)] = key(
        None, "precision of sums over micro-batches; null: fp32 here, unless gradients are kept in 16 bits"
    )
    param_dtype: Annotated[str | None, choice("fp32", "fp16", "bf16", null=True)] = key(
        None, "precision of the parameters; must agree with fp16 and bf16"
    )
    buffer_dtype: Annotated[str | None, choice("fp32", "fp16", "bf16", null=True)] = key(
        None, "precision of floating-point buffers of modules; null: each keeps its type"
    )


class Optimizer(Section):
    """`optimizer`: type and its parameters; `params` is checked against the type."""

    type: Text = key(
        "AdamW",
        "Adam, AdamW, Adagrad, Lamb, Lion, SGD, Muon, OneBitAdam, ZeroOneAdam, OneBitLamb, MuAdam, MuAdamW, MuSGD (of"
        " the package mup), or another elementwise class of torch.optim",
    )
    params: Mapping_ = key({}, "parameters of the type")
    legacy_fusion: Flag = key(False, "old fused form", inert("it is obsolete"))
    torch_adam: Flag = key(False, "use torch's optimizer", inert("it is read inside params, as in DeepSpeed"))


class Scheduler(Section):
    """`scheduler`: type and its parameters; `params` is checked against the type."""

    type: Text = key("WarmupLR", "WarmupLR, WarmupDecayLR, ..., or a class of torch.optim.lr_scheduler")
    params: Mapping_ = key({}, "parameters of the type")
