"""Precision, and the sections that name an optimizer and a schedule."""

from __future__ import annotations

from typing import Annotated, Any

from launcher.config.fields import (
    WORKS,
    Count,
    Flag,
    Mapping_,
    NonNegative,
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

    type: Text = key("AdamW", "Adam, AdamW, Adagrad, Lion, SGD, or another elementwise class of torch.optim")
    params: Mapping_ = key({}, "parameters of the type")
    legacy_fusion: Flag = key(False, "old fused form", inert("it is obsolete"))


class Scheduler(Section):
    """`scheduler`: type and its parameters; `params` is checked against the type."""

    type: Text = key("WarmupLR", "WarmupLR, WarmupDecayLR, ..., or a class of torch.optim.lr_scheduler")
    params: Mapping_ = key({}, "parameters of the type")
