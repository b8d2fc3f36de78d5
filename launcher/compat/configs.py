"""Configs as objects, with DeepSpeed's classes and field names: of `deepspeed.runtime.config` and its neighbours.

What a field may hold is checked by the schema of the built-in engine; an engine is not built from these.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import Enum, IntEnum
from functools import reduce
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from launcher.base.errors import ConfigAssertionError, ConfigError
from launcher.base.log import get_logger
from launcher.compat.ranks import get_world_size
from launcher.config.auto import AutoFacts, resolve_auto
from launcher.config.check import normalise
from launcher.config.elastic import elastic_batch_of
from launcher.config.equations import solve_batch
from launcher.config.fields import AUTO, Section, aliases_of
from launcher.config.load import load_config
from launcher.config.schema import Config, OffloadOptimizer, OffloadParam, ZeroOptimization

_ZERO = "zero_optimization"


class DeepSpeedConfigModel(BaseModel):
    """Base of config classes, also of a script's own: unknown keys are errors, `"auto"` means the default.

    A field with `json_schema_extra={"deprecated": True, "new_param": name}` gives its value to the field `name`, which
    may be in a section (`"section.name"`); "new_param_fn" translates it, and "set_new_param": False only warns.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        """strict: take `"auto"` as a value. Raises: pydantic.ValidationError; ConfigAssertionError for old and new."""
        super().__init__(**{name: value for name, value in data.items() if strict or value != AUTO})
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if isinstance(extra, dict) and extra.get("deprecated") and name in self.model_fields_set:
                self._replace(name, extra)

    def _replace(self, name: str, extra: Mapping[str, Any]) -> None:
        target = str(extra.get("new_param", ""))
        get_logger().warning("config: %s is deprecated%s", name, f", use {target}" if target else "")
        if not target or not extra.get("set_new_param", True):
            return
        *sections, last = target.split(".")
        owner: BaseModel = reduce(getattr, sections, self)
        if last in owner.model_fields_set:
            raise ConfigAssertionError(f"{name} and {target} are the same key", where=name, hint="remove one")
        translate = extra.get("new_param_fn", lambda value: value)
        setattr(owner, last, translate(getattr(self, name)))


def dict_raise_error_on_duplicate_keys(ordered_pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return pairs as a dictionary, an `object_pairs_hook` of `json.load`. Raises: ValueError for a key given twice."""
    pairs = list(ordered_pairs)
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = [key for key in found if keys.count(key) > 1]
        raise ValueError(f"Duplicate keys in DeepSpeed config: {twice}")
    return found


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """Return a value of a config, or the default."""
    return param_dict.get(param_name, param_default_value)


# ---- zero_optimization ----


class ZeroStageEnum(IntEnum):
    """What is sharded."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class OffloadDeviceEnum(str, Enum):
    """Where something is kept."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


def _like(section: type[Section], name: str, base: type[DeepSpeedConfigModel], **changed: Any) -> Any:
    """Return a model with the keys of a section, under names without "stage3_". changed: name -> type, default."""
    fields: dict[str, Any] = {}
    for key, field in section.model_fields.items():
        short = key.removeprefix("stage3_") if key in aliases_of(section).values() else key
        parts = (field.annotation, *field.metadata)
        kind = Annotated[parts] if field.metadata else field.annotation
        factory = field.default_factory
        default = {"default": field.default} if factory is None else {"default_factory": factory}
        fields[short] = (kind, Field(**default, alias=None if short == key else key, description=field.description))
    return create_model(name, __base__=base, __module__=__name__, **{**fields, **changed})


DeepSpeedZeroOffloadParamConfig = _like(OffloadParam, "DeepSpeedZeroOffloadParamConfig", DeepSpeedConfigModel)


class _OffloadOptimizerBase(DeepSpeedConfigModel):
    @property
    def pipeline(self) -> bool:
        """Whether states are read or written beside the update of others."""
        return bool(self.__dict__["pipeline_read"] or self.__dict__["pipeline_write"])


DeepSpeedZeroOffloadOptimizerConfig = _like(
    OffloadOptimizer, "DeepSpeedZeroOffloadOptimizerConfig", _OffloadOptimizerBase
)


class _ZeroBase(DeepSpeedConfigModel):
    @model_validator(mode="before")
    @classmethod
    def _with_one_spelling(cls, data: Any) -> Any:
        found = normalise({_ZERO: dict(data)})
        if found.errors:
            raise ValueError(found.errors[0].message)
        return found.data[_ZERO]

    @model_validator(mode="after")
    def _with_overlap(self) -> _ZeroBase:
        if self.__dict__["overlap_comm"] is None:
            self.__dict__["overlap_comm"] = self.__dict__["stage"] == ZeroStageEnum.weights
        return self


DeepSpeedZeroConfig = _like(
    ZeroOptimization,
    "DeepSpeedZeroConfig",
    _ZeroBase,
    offload_param=(DeepSpeedZeroOffloadParamConfig | None, None),
    offload_optimizer=(DeepSpeedZeroOffloadOptimizerConfig | None, None),
)


def get_zero_config(param_dict: Mapping[str, Any]) -> Any:
    """Return the section `zero_optimization` of a config, of any form, as an object."""
    return DeepSpeedZeroConfig(**normalise(param_dict).data.get(_ZERO, {}))


# ---- precision ----


def _plain_number(value: Any) -> Any:
    """Refuse what pydantic would make a number of: true, and what is not finite."""
    try:
        is_number = not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError):
        is_number = False
    if not is_number:
        raise ValueError(f"it must be a number, and finite, not {value!r}")
    return value


_Int = Annotated[int, BeforeValidator(_plain_number)]
_Float = Annotated[float, BeforeValidator(_plain_number)]


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """The section `fp16`."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: _Float = Field(0, ge=0)
    initial_scale_power: int = 16
    loss_scale_window: _Int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: _Int = 1
    fp16_master_weights_and_grads: bool = False

    @model_validator(mode="after")
    def _with_a_scale(self) -> DeepSpeedFP16Config:
        if self.enabled and self.loss_scale == 0 and min(self.loss_scale_window, self.min_loss_scale) <= 0:
            raise ValueError("with a dynamic loss scale loss_scale_window and min_loss_scale must be at least 1")
        return self

    def initial_dynamic_scale(self) -> int:
        """Return the loss scale of the first step, where it is dynamic."""
        return int(2**self.initial_scale_power)

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the arguments of `DynamicLossScaler`."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """The section `bf16`."""

    enabled: bool = False
    immediate_grad_update: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False


def get_float16_config(param_dict: Mapping[str, Any]) -> DeepSpeedFP16Config:
    """Return the section `fp16` of a config as an object."""
    return DeepSpeedFP16Config(**param_dict.get("fp16", {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    """Return the section `bf16`, or `bfloat16`, of a config as an object."""
    return DeepSpeedBF16Config(**(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))


# ---- the whole config ----


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """Return the largest norm of all gradients together, 0 for no clipping."""
    return float(param_dict.get("gradient_clipping", Config.model_fields["gradient_clipping"].default))


def get_log_level(param_dict: Mapping[str, Any]) -> str | None:
    """Return the level of the engine's log, None for what it is."""
    return param_dict.get("log_level")


# Attribute -> the key whose value it is.
_OF_KEYS = {
    "sparse_gradients_enabled": "sparse_gradients",
    "flops_profiler_config": "flops_profiler",
    "activation_checkpointing_config": "activation_checkpointing",
    "checkpoint_config": "checkpoint",
    "comms_config": "comms_logger",
    "timers_config": "timers",
    "tensor_parallel_config": "tensor_parallel",
    "expert_parallel_config": "expert_parallel",
    "compile_config": "compile",
    "nebula_config": "nebula",
    "use_data_before_expert_parallel_": "use_data_before_expert_parallelism",
    "elasticity_enabled": "elasticity.enabled",
    "amp_enabled": "amp.enabled",
    "pld_enabled": "progressive_layer_drop.enabled",
    "data_efficiency_enabled": "data_efficiency.enabled",
    "curriculum_enabled_legacy": "curriculum_learning.enabled",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_dtype": "torch_autocast.dtype",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "grad_accum_dtype": "data_types.grad_accum_dtype",
    "param_dtype": "data_types.param_dtype",
    "buffer_dtype": "data_types.buffer_dtype",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "checkpoint_parallel_write_pipeline": "checkpoint.parallel_write.pipeline_stage",
    "mics_shard_size": "zero_optimization.mics_shard_size",
}


class DeepSpeedConfig:
    """The values in force of a config: its keys are attributes, sections have theirs, the batch sizes are solved."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        """config: a path, JSON text or its base64, or a dict. mpu, mesh_device: say which ranks have other data.

        What the engine would refuse is taken: none is built. Raises: ConfigError.
        """
        loaded = load_config(config, for_planning=True, is_of_engine=True)
        settings = loaded.config
        self.world_size = _data_ranks(settings.sequence_parallel_size, mpu, mesh_device)
        self._settings, _ = resolve_auto(settings, AutoFacts(world_size=self.world_size, hidden_size=None))
        self._param_dict = loaded.raw
        settings = self._settings
        self.train_batch_size = settings.train_batch_size
        self.train_micro_batch_size_per_gpu = settings.train_micro_batch_size_per_gpu
        self.gradient_accumulation_steps = settings.gradient_accumulation_steps
        self._configure_train_batch_size()
        self.zero_config = get_zero_config(loaded.raw)
        self.zero_optimization_stage = int(settings.zero_optimization.stage)
        self.zero_enabled = self.zero_optimization_stage > 0
        self.float16_config, self.bfloat16_config = get_float16_config(loaded.raw), get_bfloat16_config(loaded.raw)
        optimizer, scheduler = settings.optimizer, settings.scheduler
        self.optimizer_name = None if optimizer is None else optimizer.type.lower()
        self.optimizer_params = None if optimizer is None else dict(loaded.raw["optimizer"].get("params") or {})
        self.optimizer_legacy_fusion = optimizer is not None and optimizer.legacy_fusion
        self.scheduler_name = None if scheduler is None else scheduler.type
        self.scheduler_params = None if scheduler is None else dict(loaded.raw["scheduler"].get("params") or {})
        self.pipeline = settings.pipeline.model_dump()
        self.aio_config = settings.aio.model_dump()
        self.checkpoint_tag_validation_enabled = settings.checkpoint.tag_validation != "Ignore"
        self.checkpoint_tag_validation_fail = settings.checkpoint.tag_validation == "Fail"
        self.eigenvalue_enabled = self.eigenvalue_verbose = False
        self.monitor_config = settings

    def _configure_train_batch_size(self) -> None:
        """Solve the batch sizes again, after one was set. Raises: ConfigAssertionError."""
        given = self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        sizes = solve_batch(*given, self.world_size).sizes
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = sizes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return reduce(getattr, _OF_KEYS.get(name, name).split("."), self._settings)


def _data_ranks(sequence_size: int, mpu: Any, mesh_device: Any) -> int:
    """Return how many ranks have different samples."""
    if mpu is not None and hasattr(mpu, "get_data_parallel_world_size"):
        return int(mpu.get_data_parallel_world_size())
    if mpu is not None:
        return get_world_size() // int(mpu.get_sequence_parallel_world_size())
    if mesh_device is not None:
        return get_world_size(mesh_device.get_group(mesh_dim="data_parallel"))
    return max(1, get_world_size() // sequence_size) if isinstance(sequence_size, int) else get_world_size()


# ---- elasticity ----

_OLDEST_WITH_ELASTICITY = (0, 3, 8)


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether the config's `elasticity` is enabled."""
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[Any, ...]:
    """Return the batch that `elasticity` of a config chooses and the world sizes that it fits, as the engine does.

    Third, with a `world_size` or `return_microbatch`, the micro-batch of that world: by default the one that
    WORLD_SIZE names. Raises: ConfigError, DeepSpeed's `ElasticityError` and its kin, for a section that is missing, off
    or wrong, and for a world that the batch does not fit; ValueError for a config that is not a dictionary.
    """
    if not isinstance(ds_config, Mapping):
        raise ValueError(f"a config is a dictionary, got {type(ds_config).__name__}: {ds_config!r}")
    release = tuple(int(part) for part in target_deepspeed_version.split("+")[0].split(".")[:3] if part.isdigit())
    if release < _OLDEST_WITH_ELASTICITY:
        raise ConfigError(f"DeepSpeed {target_deepspeed_version} has no elasticity", where="elasticity")
    batch = elastic_batch_of(load_config({"elasticity": dict(ds_config.get("elasticity", {}))}).config)
    if batch is None:
        raise ConfigError("elasticity is off", where="elasticity", hint='set "enabled" to true in the section')
    found = batch.train_batch_size, list(batch.world_sizes)
    if world_size <= 0 and not return_microbatch:
        return found
    return *found, batch.plan_for(world_size if world_size > 0 else get_world_size()).micro_batch_size
