"""Rules between the keys of precision, of how gradients travel, of optimizers that decide it, and of experts."""

from __future__ import annotations

from launcher.config.fields import AUTO
from launcher.config.positions import Path
from launcher.config.schema import Config
from launcher.config.schema_optimizers import ONE_BIT_OPTIMIZERS
from launcher.config.schema_training import FLOAT16

Problem = tuple[Path, str, str]  # the key, what is wrong, what to do


def precision_problems(config: Config) -> list[Problem]:
    """Return what contradicts itself among the keys of precision."""
    return [*_one_precision(config), *_scale(config), *_kept_types(config), *_reduction(config)]


def _one_precision(config: Config) -> list[Problem]:
    names = ("fp16", "bf16", "torch_autocast", "amp")
    first, *others = [name for name in names if getattr(config, name).enabled is True] or [""]
    if first == "bf16" and others == ["torch_autocast"] and config.torch_autocast.dtype not in FLOAT16:
        others = []  # autocast computes norms and losses of a bf16 model in fp32
    problems: list[Problem] = [
        ((other, "enabled"), f"{first} and {other} are both enabled", "enable one of them") for other in others
    ]
    if config.amp.enabled is True and config.amp.opt_level == "O3":
        message = "amp.opt_level O3 keeps no fp32 weights, which does not train"
        problems.append((("amp", "opt_level"), message, "use O1 or O2, or the fp16 section"))
    return problems


def _scale(config: Config) -> list[Problem]:
    if config.fp16.enabled is True and config.fp16.loss_scale == 0 and config.fp16.min_loss_scale == 0:
        path = ("fp16", "min_loss_scale")
        return [(path, "min_loss_scale 0 would end in a loss scale of 0", "use 1, the default")]
    return []


def _kept_types(config: Config) -> list[Problem]:
    """Check what masters, gradient sums and states are kept in."""
    problems: list[Problem] = []
    fp16, bf16, sums = config.fp16, config.bf16, config.data_types.grad_accum_dtype
    enabled = {getattr(config, name).enabled for name in ("fp16", "bf16")}
    is_open = AUTO in enabled and True not in enabled
    model = "fp16" if fp16.enabled is True else "bf16" if bf16.enabled is True else "fp32"
    given = config.data_types.param_dtype
    if given not in (None, AUTO, model) and not is_open:
        path = ("data_types", "param_dtype")
        hint = f'enable the {given} section, or remove "param_dtype"' if given != "fp32" else 'remove "param_dtype"'
        problems.append((path, f"param_dtype {given} contradicts the other keys: the model is {model}", hint))
    if sums not in (None, AUTO, "fp32", model) and not is_open:
        path = ("data_types", "grad_accum_dtype")
        problems.append((path, f"gradients of a model in {model} cannot be summed in {sums}", "use fp32"))
    if bf16.enabled is True and bf16.bf16_optimizer_states is True:
        path = ("bf16", "bf16_optimizer_states")
        if bf16.bf16_master_weights_and_grads is False:
            hint = 'add "bf16_master_weights_and_grads": true'
            problems.append((path, "bf16_optimizer_states needs bf16 master weights", hint))
        elif sums == "fp32":
            message = "bf16_optimizer_states needs gradient sums in bf16"
            problems.append((path, message, "remove data_types.grad_accum_dtype"))
    return problems


def _reduction(config: Config) -> list[Problem]:
    factor = config.gradient_predivide_factor
    path = ("gradient_predivide_factor",)
    if factor == 0:
        return [(path, "gradient_predivide_factor 0 divides by zero", "use 1, the default")]
    if factor not in (1.0, AUTO) and config.prescale_gradients is True:
        return [(path, "prescale_gradients divides before sending too", "use one of them")]
    return []


def one_bit_problems(config: Config) -> list[Problem]:
    """Return what an optimizer with one-bit communication cannot do with the other keys."""
    name = "" if config.optimizer is None else config.optimizer.type
    if name not in ONE_BIT_OPTIMIZERS:
        return []
    problems: list[Problem] = []
    if config.zero_optimization.stage not in (0, AUTO):
        message = f"{name} cannot run at ZeRO stage {config.zero_optimization.stage}: every rank needs whole momenta"
        problems.append((("zero_optimization", "stage"), message, "use stage 0, or an optimizer such as AdamW"))
    fp16, bf16, sums = config.fp16, config.bf16, config.data_types.grad_accum_dtype
    for section, kept in (("fp16", fp16.fp16_master_weights_and_grads), ("bf16", bf16.bf16_master_weights_and_grads)):
        if kept is True and getattr(config, section).enabled is True:
            path = (section, f"{section}_master_weights_and_grads")
            problems.append((path, f"{name} needs fp32 masters: its errors are corrected in small steps", "remove it"))
    if sums not in (None, "fp32", AUTO):
        problems.append((("data_types", "grad_accum_dtype"), f"{name} needs gradient sums in fp32", "use fp32"))
    if name == "OneBitLamb" and fp16.enabled is True and fp16.loss_scale not in (0, AUTO):
        path = ("fp16", "loss_scale")
        problems.append((path, f"{name} needs a dynamic loss scale, as in DeepSpeed", 'use "loss_scale": 0'))
    return problems


def unused_expert_size(config: Config) -> list[tuple[Path, str]]:
    """Return that a number of ranks for experts has no effect, where no experts are spread."""
    size = config.expert_parallel.autoep_size
    if config.expert_parallel.enabled is True or size in (1, AUTO):
        return []
    message = f"expert_parallel.autoep_size {size} has no effect: expert_parallel.enabled is not true"
    return [(("expert_parallel", "autoep_size"), message)]
