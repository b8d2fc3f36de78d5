"""DeepSpeed's classes of wrapped optimizers, for `isinstance(engine.optimizer, ...)`.

The built-in engine has one class for all stages and precisions. What DeepSpeed would have built is in the config.
"""

from __future__ import annotations

from typing import Any

from launcher.base.errors import EngineError
from launcher.compat.optimizers import FusedAdam
from launcher.config.schema import Config
from launcher.engine.optimizer import ZeroOptimizer

_FUSED = ("Adam", "AdamW", "OneBitAdam", "ZeroOneAdam")  # types of the config that DeepSpeed updates as one buffer


class _ByConfig(type):
    """Answers `isinstance` by the config of the engine whose optimizer is asked about."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if not isinstance(instance, ZeroOptimizer) or instance.settings is None:
            return False
        return issubclass(_class_of(instance, instance.settings), cls)


class DeepSpeedOptimizer(metaclass=_ByConfig):
    """Every wrapped optimizer: at stage 0 in fp32 there is none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: `initialize()` wraps optimizers. Raises: EngineError."""
        raise EngineError(
            f"{type(self).__name__} cannot be built by a script",
            hint="give the optimizer to deepspeed.initialize(), which returns it wrapped",
        )


class ZeROOptimizer(DeepSpeedOptimizer):
    """Those whose states are sharded."""


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Stages 1 and 2."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):  # DeepSpeed's name
    """Stage 3."""


class BF16_Optimizer(ZeROOptimizer):  # DeepSpeed's name
    """Stage 1 in bf16 with `data_types.grad_accum_dtype` fp32, in device memory; stage 0 of a pipeline in bf16."""


class FP16_Optimizer(DeepSpeedOptimizer):  # DeepSpeed's name
    """Stage 0 in 16 bits, with an Adam of DeepSpeed's."""


class FP16_UnfusedOptimizer(DeepSpeedOptimizer):  # DeepSpeed's name
    """Stage 0 in 16 bits, with another optimizer."""


class _Plain:
    """Stage 0 in fp32."""


def _class_of(optimizer: ZeroOptimizer, settings: Config) -> type:
    """Return the class that DeepSpeed would wrap an optimizer in."""
    stage = int(settings.zero_optimization.stage)
    is_bf16 = bool(settings.bf16.enabled)
    if stage == 1 and is_bf16 and settings.data_types.grad_accum_dtype == "fp32":
        is_offloaded = settings.zero_optimization.offload_optimizer.device != "none"
        return DeepSpeedZeroOptimizer if is_offloaded else BF16_Optimizer
    if stage > 0:
        return DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer
    if not is_bf16 and not settings.fp16.enabled:
        return _Plain
    if is_bf16 and optimizer.is_of_pipeline:
        return BF16_Optimizer
    return FP16_Optimizer if _is_fused(optimizer, settings) else FP16_UnfusedOptimizer


def _is_fused(optimizer: ZeroOptimizer, settings: Config) -> bool:
    if optimizer._client is not None:
        return isinstance(optimizer._client, FusedAdam)
    section = settings.optimizer
    return section is not None and section.type in _FUSED and not section.params.get("torch_adam", False)
