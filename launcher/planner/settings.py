"""Settings from an engine config, settings as an engine config, and those of the ladder to choose from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.base.errors import LauncherError, UsageError
from launcher.config.auto import AutoFacts, resolve_auto
from launcher.config.check import check
from launcher.config.equations import BATCH_KEYS, mesh_sizes, solve_batch
from launcher.config.fields import AUTO, Auto
from launcher.config.load import load_config, patched
from launcher.config.policies import DType, Place, zero_policy
from launcher.config.rules import pipeline_plan
from launcher.config.schema import Config
from launcher.planner.ladder import (
    INFERENCE_STANDINGS,
    PIPELINE_STANDINGS,
    STANDINGS,
    EngineFacts,
    Standing,
    standing_keys,
)
from launcher.planner.memory import Setting, States, rank_memory
from launcher.planner.model import ModelFacts, Parameter
from launcher.sharding.mesh import MeshSizes
from launcher.sharding.pipeline import DEFAULT_SCHEDULE, PipelinePlan

# States per parameter of each optimizer; SGD keeps one when it has momentum, Muon two beside matrices.
OPTIMIZER_STATES = {
    "Adam": 2, "AdamW": 2, "Lamb": 2, "OneBitAdam": 3, "ZeroOneAdam": 5, "OneBitLamb": 4, "MuAdam": 2, "MuAdamW": 2,
    "Adagrad": 1, "Lion": 1, "Muon": 1, "SGD": 0, "MuSGD": 0,
}  # fmt: skip
DEFAULT_PRECISION = "bf16"


def ladder(config: Config, world_size: int, *, trains: bool = True) -> list[Setting]:
    """Return the settings of the ladder, quickest first, with the precision and buffers of a resolved config."""
    has_pipeline = mesh_sizes(config, world_size).pipeline > 1
    standings: Sequence[Standing] = PIPELINE_STANDINGS if has_pipeline else STANDINGS
    if not trains:
        standings = INFERENCE_STANDINGS[:1] if has_pipeline else INFERENCE_STANDINGS
    return [setting_of(at(config, *one), world_size, trains=trains) for one in standings]


def standing_of(config: Config) -> Standing:
    """Return where a config has the states of a model."""
    zero = config.zero_optimization
    place = Place.DEVICE.value
    optimizer = str(zero.offload_optimizer.device) if zero.stage else place
    return Standing(int(zero.stage), optimizer, str(zero.offload_param.device) if zero.stage == 3 else place)


def at(config: Config, stage: int, optimizer: str, param: str) -> Config:
    """Return a config at another stage and with other offload: `none`, `cpu` or `nvme`.

    Raises: UsageError for parameters that are to be offloaded below stage 3, where a config's own have no effect.
    """
    if param != "none" and stage != 3:
        raise UsageError(f"parameters are offloaded at stage 3 only, not at {stage}", hint="use --stage 3")
    zero = config.zero_optimization
    places = {
        "offload_optimizer": zero.offload_optimizer.model_copy(update={"device": optimizer}),
        "offload_param": zero.offload_param.model_copy(update={"device": param}),
    }
    return config.model_copy(update={"zero_optimization": zero.model_copy(update={"stage": stage, **places})})


def in_precision(
    config: Config, name: str, *, has_16bit_master: bool = False, has_16bit_states: bool = False
) -> Config:
    """Return a config in another precision.

    has_16bit_master: `fp16_master_weights_and_grads` and its bf16 twin, beside what the config says.
    has_16bit_states: `bf16_optimizer_states`, too. Raises: UsageError.
    """
    if name == "fp32" and (has_16bit_master or has_16bit_states):
        raise UsageError("16-bit masters or states need a 16-bit precision", hint="choose bf16 or fp16")
    if name == "fp16" and has_16bit_states:
        raise UsageError("optimizer states in 16 bit need bf16", hint="choose bf16")
    fp16, bf16 = {"enabled": name == "fp16"}, {"enabled": name == "bf16"}
    if has_16bit_master:
        fp16["fp16_master_weights_and_grads"] = bf16["bf16_master_weights_and_grads"] = True
    if has_16bit_states:
        bf16["bf16_optimizer_states"] = True
    return config.model_copy(
        update={"fp16": config.fp16.model_copy(update=fp16), "bf16": config.bf16.model_copy(update=bf16)}
    )


def as_config(setting: Setting) -> dict[str, Any]:
    """Return the part of an engine config that asks for this setting."""
    offload, precision = setting.policy.offload, setting.policy.precision.param
    keys = standing_keys(Standing(setting.stage, offload.optimizer.value, offload.params.value))
    axes: dict[str, Any] = {}
    if setting.sizes.tensor > 1:
        axes["tensor_parallel"] = {"autotp_size": setting.sizes.tensor}
    if setting.sizes.pipeline > 1:
        axes["pipeline"] = _pipeline_keys(setting)
    if setting.sizes.sequence > 1:
        axes["sequence_parallel_size"] = setting.sizes.sequence
    if setting.sizes.expert > 1:
        axes["expert_parallel"] = {"enabled": True, "autoep_size": setting.sizes.expert}
    if precision is DType.FP32:
        return {**keys, **axes}
    return {precision.value: {"enabled": True}, **keys, **axes}


def _pipeline_keys(setting: Setting) -> dict[str, Any]:
    plan = setting.pipeline
    keys: dict[str, Any] = {"stages": plan.num_ranks}
    if setting.partition != "best":
        keys["partition"] = setting.partition
    if plan.schedule != DEFAULT_SCHEDULE:
        keys["schedule"] = plan.schedule
    return keys | ({"virtual_stages": plan.num_virtual} if plan.num_virtual > 1 else {})


def freed_bytes(facts: EngineFacts, patch: Mapping[str, Any]) -> int | None:
    """Return what a patch frees of the memory that a rank's model states are in; None where no formula says it.

    Of activations none does: they depend on the script. On a CPU host memory is the device's.
    """
    if facts.num_params is None or "zero_optimization" not in patch:
        return None
    before: dict[str, Any] = standing_keys(facts.standing)
    if facts.precision != DType.FP32.value:
        before[facts.precision] = {"enabled": True}
    if facts.optimizer_type is not None:
        before["optimizer"] = {"type": facts.optimizer_type, "params": {}}
    model = ModelFacts("model", "", (Parameter("model", facts.num_params),))

    def needed(data: Mapping[str, Any]) -> int:
        config = resolve(load_config(data, for_planning=True).config, facts.num_shards, None)
        found = rank_memory(model, setting_of(config, facts.num_shards, trains=facts.trains), facts.num_shards)
        return found.model_states + (found.host if facts.device == "cpu" else 0)

    try:
        freed = needed(before) - needed(patched(before, patch))
    except LauncherError:  # a combination that this release does not know
        return None
    return freed if freed > 0 else None


def refusals(setting: Setting) -> list[str]:
    """Return why the engine of this release would not run a setting; empty when it would."""
    found = check({"train_micro_batch_size_per_gpu": 1, **as_config(setting)}, None).errors
    return [f"{item.message} → {item.hint}" if item.hint else item.message for item in found]


def resolve(config: Config, world_size: int, hidden_size: int | None) -> Config:
    """Give every `"auto"` a value; those that do not matter for memory any value.

    An automatic precision is the 16-bit one. Raises: ConfigError.
    """
    facts = AutoFacts(
        world_size,
        mesh_sizes(config, world_size).model_size,
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


def setting_of(config: Config, world_size: int, *, trains: bool = True) -> Setting:
    """Return the setting that a resolved config asks for.

    world_size: all ranks. trains: False: what the config says of an optimizer has no effect. Raises: UsageError for a
    combination that does not exist, ConfigError for a wrong mesh.
    """
    zero = config.zero_optimization
    if not trains:
        config = at(config, zero.stage, "none", zero.offload_param.device if zero.stage == 3 else "none")
    sizes = mesh_sizes(config, world_size)
    policy = zero_policy(config, sizes.num_replicas)
    pipeline = pipeline_plan(config, _num_micro_batches(config, sizes)) or PipelinePlan()
    return Setting(zero.stage, policy, states_of(config), sizes, pipeline, config.pipeline.partition, trains)


def _num_micro_batches(config: Config, sizes: MeshSizes) -> int:
    """Return the micro-batches of a step. A config that does not say has one for each stage, which fills a pipeline."""
    train, micro, steps = (getattr(config, name) for name in BATCH_KEYS)
    if train is None and steps is None:
        return max(1, sizes.pipeline)
    if train is None and micro is None:
        return steps  # type: ignore[no-any-return]
    return solve_batch(train, micro, steps, sizes.data, sizes.model_size).accumulation_steps


def micro_batch_of(config: Config, world_size: int) -> int | None:
    """Return the micro-batch that a resolved config asks for, None when it does not say."""
    if config.train_micro_batch_size_per_gpu is not None:
        return config.train_micro_batch_size_per_gpu
    if config.train_batch_size is None:
        return None
    num_shares = mesh_sizes(config, world_size).data
    return max(1, config.train_batch_size // ((config.gradient_accumulation_steps or 1) * num_shares))


def states_of(config: Config) -> States:
    """Return what the optimizer of a config keeps of each element."""
    optimizer = config.optimizer
    if optimizer is None:
        return States()
    num_states = OPTIMIZER_STATES.get(optimizer.type, 2)
    if num_states == 0 and optimizer.params.get("momentum"):
        num_states = 1
    return States(num_states, 2 * num_states if optimizer.type == "Muon" else None)
