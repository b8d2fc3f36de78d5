"""What is done with the inputs of checkpointed functions: from the config section and from `configure()`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from launcher.base.errors import EngineError
from launcher.comm.device import DeviceRuntime, local_device
from launcher.comm.groups import RankGroup
from launcher.config.auto import AutoFacts, resolve_auto
from launcher.config.load import load_config
from launcher.config.schema_other import ActivationCheckpointing


@dataclass(frozen=True)
class ActivationSettings:
    """The settings in force, by the names of `configure()`."""

    partition_activations: bool = False
    contiguous_checkpointing: bool = False
    num_checkpoints: int | None = None
    checkpoint_in_cpu: bool = False
    synchronize: bool = False
    profile: bool = False
    group: RankGroup | None = None  # ranks that compute the same inputs; None: this one alone


@dataclass
class _Sources:
    """Where settings come from: what a call says counts more than what a section says, whichever came first."""

    section: ActivationCheckpointing | None = None
    said: dict[str, Any] | None = None  # None: `configure()` was not called


_sources = _Sources()


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how the inputs of checkpointed functions are kept from now on. Every rank must call it alike.

    mpu_: has `get_model_parallel_group()`, `..._rank()` and `..._world_size()`, or the same with `tensor_model`; the
    ranks of this group must call checkpointed functions with equal inputs. deepspeed_config: path or dict whose
    `activation_checkpointing` section is used. Others: override the section's keys; None: as the section or an
    earlier call says. Without any call, `initialize()` applies its config's section.

    partition_activations: each rank of the group keeps its part of each input. contiguous_checkpointing: inputs are
    copied to buffers for `num_checkpoints` of them. checkpoint_in_cpu: inputs are kept in page-locked host memory.
    synchronize: wait for the GPU before and after. profile: log times.

    Raises: ConfigError for the config, EngineError for an `mpu_` without these functions.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
        "group": None if mpu_ is None else _group_of(mpu_),
    }
    if deepspeed_config is not None:
        config, _ = resolve_auto(load_config(deepspeed_config).config, AutoFacts())
        _sources.section = config.activation_checkpointing
    said = {name: value for name, value in given.items() if value is not None}
    _sources.said = {**(_sources.said or {}), **said}


def use_section(section: ActivationCheckpointing) -> None:
    """Apply the section of an engine's config; one that says nothing changes nothing."""
    if section != ActivationCheckpointing():
        _sources.section = section


def is_configured() -> bool:
    """Whether `configure()` was called, or an engine's config has the section."""
    return _sources.section is not None or _sources.said is not None


def settings_in_force() -> ActivationSettings:
    """Return the settings: the defaults, the section over them, and over it what `configure()` was told."""
    section = _sources.section or ActivationCheckpointing()
    settings = ActivationSettings(
        partition_activations=section.partition_activations,
        contiguous_checkpointing=section.contiguous_memory_optimization,
        num_checkpoints=section.number_checkpoints,
        checkpoint_in_cpu=section.cpu_checkpointing,
        synchronize=section.synchronize_checkpoint_boundary,
        profile=section.profile,
    )
    return replace(settings, **(_sources.said or {}))


def _group_of(mpu: Any) -> RankGroup:
    for kind in ("model_parallel", "tensor_model_parallel"):
        found = [getattr(mpu, f"get_{kind}_{what}", None) for what in ("rank", "world_size", "group")]
        if all(map(callable, found)):
            rank, world_size, process_group = (get() for get in found if get is not None)
            runtime = DeviceRuntime(local_device())
            return RankGroup(rank, world_size, process_group if world_size > 1 else None, runtime)
    raise EngineError(
        f"configure(): the mpu, a {type(mpu).__name__}, does not name its model-parallel group",
        hint="it needs get_model_parallel_rank(), get_model_parallel_world_size() and get_model_parallel_group()",
    )
