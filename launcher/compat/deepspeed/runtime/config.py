"""`deepspeed.runtime.config`: a config that is read and checked without an engine."""

from __future__ import annotations

from typing import Any

from launcher.base.errors import ConfigError as DeepSpeedConfigError
from launcher.compat.ranks import get_world_size
from launcher.config.auto import AutoFacts, resolve_auto
from launcher.config.batch import solve_batch
from launcher.config.load import load_config

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]


class DeepSpeedConfig:
    """The values in force of a config: its keys are attributes, sections have theirs, the batch sizes are solved."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        """config: a path, JSON text or dict. Raises: DeepSpeedConfigError; also for `mpu` and `mesh_device`."""
        if mpu is not None or mesh_device is not None:
            raise DeepSpeedConfigError("mpu and mesh_device are not supported", hint="all ranks have different data")
        world_size = get_world_size()
        loaded = load_config(config, world_size=world_size)
        self._settings, _ = resolve_auto(loaded.config, AutoFacts(world_size=world_size, hidden_size=None))
        settings = self._settings
        sizes = settings.train_batch_size, settings.train_micro_batch_size_per_gpu, settings.gradient_accumulation_steps
        self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps = solve_batch(
            *sizes, world_size
        ).sizes
        self.zero_config = settings.zero_optimization
        self.zero_optimization_stage = int(settings.zero_optimization.stage)
        self.zero_enabled = self.zero_optimization_stage > 0
        self.float16_config, self.bfloat16_config = settings.fp16, settings.bf16
        self.optimizer_name = None if settings.optimizer is None else str(settings.optimizer.type).lower()
        self.scheduler_name = None if settings.scheduler is None else str(settings.scheduler.type)
        self.monitor_config = settings

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._settings, name)
