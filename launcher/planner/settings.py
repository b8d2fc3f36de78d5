"""Settings from an engine config, settings as an engine config, and the ladder of settings to choose from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from launcher.config.auto import AutoFacts, resolve_auto
from launcher.config.batch import BATCH_KEYS
from launcher.config.check import check
from launcher.config.fields import AUTO, Auto
from launcher.config.schema import Config
from launcher.planner.memory import Offload, Precision, Setting

# States per parameter of each optimizer; SGD keeps one when it has momentum, Muon two beside matrices.
OPTIMIZER_STATES = {
    "Adam": 2, "AdamW": 2, "Lamb": 2, "OneBitAdam": 3, "ZeroOneAdam": 5, "OneBitLamb": 4, "MuAdam": 2, "MuAdamW": 2,
    "Adagrad": 1, "Lion": 1, "Muon": 1, "SGD": 0, "MuSGD": 0,
}  # fmt: skip
DEFAULT_PRECISION = "bf16"
EXAMPLE_NVME_PATH = "/local_nvme"  # what a config that is printed names, for its reader to replace
# From the quickest to the smallest, as the guides advise to go.
_LADDER = (
    (0, "none", "none"),
    (1, "none", "none"),
    (2, "none", "none"),
    (2, "cpu", "none"),
    (3, "none", "none"),
    (3, "cpu", "none"),
    (3, "cpu", "cpu"),
    (3, "nvme", "nvme"),
)


def ladder(base: Setting) -> list[Setting]:
    """Return the settings worth trying, quickest first, with the precision and buffers of `base`."""
    return [
        replace(base, stage=stage, offload=replace(base.offload, optimizer=optimizer, param=param))
        for stage, optimizer, param in _LADDER
    ]


def as_config(setting: Setting) -> dict[str, Any]:
    """Return the part of an engine config that asks for this setting."""
    zero: dict[str, Any] = {"stage": setting.stage}
    for name, place in (("offload_optimizer", setting.offload.optimizer), ("offload_param", setting.offload.param)):
        if place != "none":
            zero[name] = {"device": place, **({"nvme_path": EXAMPLE_NVME_PATH} if place == "nvme" else {})}
    if setting.precision.name == "fp32":
        return {"zero_optimization": zero}
    return {setting.precision.name: {"enabled": True}, "zero_optimization": zero}


def refusals(setting: Setting) -> list[str]:
    """Return why the engine of this release would not run a setting; empty when it would."""
    found = check({"train_micro_batch_size_per_gpu": 1, **as_config(setting)}, None).errors
    return [f"{item.message} → {item.hint}" if item.hint else item.message for item in found]


def resolve(config: Config, world_size: int, hidden_size: int | None) -> Config:
    """Give every `"auto"` a value; those that do not matter for memory any value.

    An automatic precision is the 16-bit one. Raises: ConfigError.
    """
    facts = AutoFacts(
        world_size=world_size,
        hidden_size=hidden_size,
        bf16=config.fp16.enabled is not True,
        fp16=config.bf16.enabled not in (True, AUTO),
        lr=1e-3,
        warmup_num_steps=0,
        total_num_steps=1,
    )
    sizes = [getattr(config, name) for name in BATCH_KEYS]
    if any(isinstance(size, Auto) for size in sizes) and not any(isinstance(size, int) for size in sizes[:2]):
        facts = replace(facts, micro_batch_size=1)
    return resolve_auto(config, facts)[0]


def from_config(config: Config, precision_name: str | None = None) -> Setting:
    """Return the setting that a resolved config asks for.

    precision_name: used instead of the config's. Raises: UsageError for a combination that does not exist.
    """
    zero = config.zero_optimization
    optimizer, param = zero.offload_optimizer, zero.offload_param
    return Setting(
        stage=zero.stage,
        precision=_precision(config, precision_name),
        offload=Offload(
            optimizer=optimizer.device,
            param=param.device,
            optimizer_ratio=optimizer.ratio,
            is_delayed=optimizer.delayed_update,
            param_buffers=param.buffer_count,
            param_buffer_numel=param.buffer_size,
            param_numel_in_cpu=param.max_in_cpu,
            sub_group_numel=zero.sub_group_size,
        ),
        max_unit_numel=zero.reduce_bucket_size,
        persistent_numel=zero.stage3_param_persistence_threshold,
        overlaps=zero.overlap_comm is not False,
        prefetch_numel=zero.stage3_prefetch_bucket_size,
        kept_numel=min(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance),
    )


def micro_batch_of(config: Config, world_size: int) -> int | None:
    """Return the micro-batch that a resolved config asks for, None when it does not say."""
    if config.train_micro_batch_size_per_gpu is not None:
        return config.train_micro_batch_size_per_gpu
    if config.train_batch_size is None:
        return None
    return max(1, config.train_batch_size // ((config.gradient_accumulation_steps or 1) * world_size))


def _precision(config: Config, name: str | None) -> Precision:
    chosen = name or ("fp16" if config.fp16.enabled else "bf16" if config.bf16.enabled else "fp32")
    is_bf16, is_fp16 = chosen == "bf16", chosen == "fp16"
    optimizer = config.optimizer
    num_states = 2 if optimizer is None else OPTIMIZER_STATES.get(optimizer.type, 2)
    if optimizer is not None and num_states == 0 and optimizer.params.get("momentum"):
        num_states = 1
    precision = Precision.of(
        chosen,
        has_16bit_master=(is_bf16 and config.bf16.bf16_master_weights_and_grads)
        or (is_fp16 and config.fp16.fp16_master_weights_and_grads),
        has_16bit_states=is_bf16 and config.bf16.bf16_optimizer_states,
        num_states=num_states,
    )
    if optimizer is not None and optimizer.type == "Muon":
        precision = replace(precision, state_bytes_beside_matrices=2 * int(precision.state_bytes))
    sums = config.data_types.grad_accum_dtype
    return precision if sums is None else replace(precision, grad_bytes=4 if sums == "fp32" else 2)
