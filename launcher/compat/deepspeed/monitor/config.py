"""`deepspeed.monitor.config`: the sections of a config that say where curves go."""

from __future__ import annotations

from typing import Any

from launcher.config.load import load_config
from launcher.config.schema import Config as DeepSpeedMonitorConfig

__all__ = ["DeepSpeedMonitorConfig", "get_monitor_config"]


def get_monitor_config(param_dict: dict[str, Any]) -> DeepSpeedMonitorConfig:
    """Return the `tensorboard`, `csv_monitor`, `wandb` and `comet` of a config, checked. Raises: ConfigError."""
    names = ("tensorboard", "csv_monitor", "wandb", "comet")
    return load_config({name: param_dict[name] for name in names if name in param_dict}).config
