"""`deepspeed.monitor.monitor`: points of curves that a script names itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launcher.compat.ranks import get_rank
from launcher.config.schema import Config
from launcher.monitor.curves import open_curves
from launcher.monitor.writers import Event

__all__ = ["MonitorMaster"]


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
