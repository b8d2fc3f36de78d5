"""Curves of a script's own: `deepspeed.monitor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from launcher.compat.ranks import get_rank
from launcher.config.load import load_config
from launcher.config.schema import Config
from launcher.monitor.curves import Event, open_curves


def get_monitor_config(param_dict: dict[str, Any]) -> Config:
    """Return the `tensorboard`, `csv_monitor`, `wandb` and `comet` of a config, checked. Raises: ConfigError."""
    names = ("tensorboard", "csv_monitor", "wandb", "comet")
    return load_config({name: param_dict[name] for name in names if name in param_dict}).config


class Monitor:
    """Writes to one place, from rank 0. Every rank must make it. The keys of its section are attributes."""

    _section: ClassVar[str]

    def __init__(self, config: Any) -> None:
        """config: the section, such as `get_monitor_config({...}).csv_monitor`.

        Raises: EngineError when it is enabled and a library is missing.
        """
        self.monitor_config = config
        self.enabled = bool(config.enabled)
        self._curves = open_curves(Config(**{self._section: config}), get_rank())

    def write_events(self, event_list: Sequence[tuple[str, Any, int]], flush: bool = True) -> None:
        """Add points: the curve's name, the value, and the number of samples or steps. Other ranks write nothing.

        flush: have readers see them at once.
        """
        self._curves.write_points([Event(name, float(value), int(position)) for name, value, position in event_list])
        if flush:
            self.flush()

    def flush(self) -> None:
        """Have readers see all points."""
        for writer in self._curves.writers:
            writer.flush()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "monitor_config":
            raise AttributeError(name)
        return getattr(self.monitor_config, name)


class TensorBoardMonitor(Monitor):
    """Event files of TensorBoard."""

    _section = "tensorboard"

    @property
    def summary_writer(self) -> Any:
        """Return torch's writer; None where this rank writes nothing."""
        return next((getattr(writer, "summary_writer", None) for writer in self._curves.writers), None)


class CsvMonitor(Monitor):
    """A CSV file for each curve."""

    _section = "csv_monitor"


class WandbMonitor(Monitor):
    """A run of Weights & Biases."""

    _section = "wandb"


class CometMonitor(Monitor):
    """An experiment of Comet."""

    _section = "comet"

    @property
    def experiment(self) -> Any:
        """Return Comet's object; None where this rank writes nothing."""
        return next((getattr(writer, "experiment", None) for writer in self._curves.writers), None)


class MonitorMaster:
    """Writes to every place that the config enables, from rank 0. Every rank must make it."""

    def __init__(self, monitor_config: Any) -> None:
        """monitor_config: of `get_monitor_config`. Raises: EngineError when a library is missing."""
        self.monitor_config = monitor_config
        self.tb_monitor = TensorBoardMonitor(monitor_config.tensorboard)
        self.csv_monitor = CsvMonitor(monitor_config.csv_monitor)
        self.wandb_monitor = WandbMonitor(monitor_config.wandb)
        self.comet_monitor = CometMonitor(monitor_config.comet)
        self._monitors = (self.tb_monitor, self.csv_monitor, self.wandb_monitor, self.comet_monitor)
        self.enabled = any(monitor.enabled for monitor in self._monitors)

    def write_events(self, event_list: Sequence[tuple[str, Any, int]]) -> None:
        """Add points: the curve's name, the value, and the number of samples or steps. Other ranks write nothing."""
        for monitor in self._monitors:
            monitor.write_events(event_list)
