"""Configs that are read and checked without an engine, and the monitor of a script's own curves."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from launcher.base.errors import ConfigError as DeepSpeedConfigError
from launcher.compat.ranks import get_rank, get_world_size
from launcher.config.auto import AutoFacts, resolve_auto
from launcher.config.batch import solve_batch
from launcher.config.load import load_config
from launcher.config.schema import Config
from launcher.monitor.curves import open_curves
from launcher.monitor.writers import Event


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


class ZeroStageEnum(IntEnum):
    """What is sharded."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def get_monitor_config(param_dict: dict[str, Any]) -> Config:
    """Return the `tensorboard`, `csv_monitor`, `wandb` and `comet` of a config, checked. Raises: ConfigError."""
    names = ("tensorboard", "csv_monitor", "wandb", "comet")
    return load_config({name: param_dict[name] for name in names if name in param_dict}).config


class MonitorMaster:
    """Writes to every place that the config enables, from rank 0. Every rank must make it."""

    def __init__(self, monitor_config: Config) -> None:
        """monitor_config: of `get_monitor_config`. Raises: EngineError when a library is missing."""
        self._curves = open_curves(monitor_config, get_rank())
        sections = (monitor_config.tensorboard, monitor_config.csv_monitor, monitor_config.wandb, monitor_config.comet)
        self.enabled = any(section.enabled for section in sections)

    def write_events(self, event_list: Sequence[tuple[str, Any, int]]) -> None:
        """Add points: the curve's name, the value, and the number of samples or steps. Other ranks write nothing."""
        self._curves.write_points([Event(name, float(value), int(position)) for name, value, position in event_list])
