"""Curves of a script's own: `deepspeed.monitor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.compat.ranks import get_rank
from launcher.config.load import load_config
from launcher.config.schema import Config
from launcher.monitor.curves import open_curves
from launcher.monitor.writers import Event


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
