"""The curves of a training: which writers a config asks for, and what they are given."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from typing import Any

from launcher.base.log import get_logger
from launcher.config.schema import Config
from launcher.monitor.writers import (
    CometWriter,
    CsvWriter,
    Event,
    TensorBoardWriter,
    WandbWriter,
    Writer,
    log_folder,
    require,
)

PREFIX = "Train/Samples/"


class Curves:
    """Gives every point to all writers, and closes them when the process ends. A writer whose disk fails is dropped."""

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = writers
        if writers:
            atexit.register(self.close)

    @property
    def writers(self) -> Sequence[Writer]:
        """Return where points go now."""
        return self._writers

    def __bool__(self) -> bool:
        return bool(self._writers)

    @property
    def enabled(self) -> bool:
        """Whether points go anywhere: on rank 0, where the config has a place for them."""
        return bool(self)

    def write_events(self, event_list: Sequence[tuple[str, Any, int]]) -> None:
        """Add a script's points: the curve's name, the value, and the number of samples or steps."""
        self.write_points([Event(name, float(value), int(position)) for name, value, position in event_list])
        for writer in self._writers:
            writer.flush()

    def write(self, values: dict[str, float], num_samples: int) -> None:
        """Add a point to each of the named curves."""
        self.write_points([Event(PREFIX + name, value, num_samples) for name, value in values.items()])

    def write_points(self, events: Sequence[Event]) -> None:
        """Add points of any curves."""
        for writer in self._writers:
            try:
                writer.write(events)
            except OSError as error:  # a full disk must not end a training
                get_logger().warning("%s stopped: %s", type(writer).__name__, error)
                self._writers = [other for other in self._writers if other is not writer]

    def close(self) -> None:
        """Bring all points home."""
        writers, self._writers = self._writers, ()
        for writer in writers:
            writer.close()
        atexit.unregister(self.close)


def open_curves(settings: Config, rank: int) -> Curves:
    """Open the writers of `tensorboard`, `csv_monitor`, `wandb` and `comet`, on rank 0. Every rank must call it.

    Raises: EngineError, on every rank, when a library is missing.
    """
    openers: list[Callable[[], Writer]] = []
    board, tables, wandb, comet = settings.tensorboard, settings.csv_monitor, settings.wandb, settings.comet
    if board.enabled:
        require("tensorboard", "tensorboard", "tensorboard")
        openers.append(lambda: TensorBoardWriter(log_folder(board.output_path, board.job_name)))
    if tables.enabled:
        openers.append(lambda: CsvWriter(log_folder(tables.output_path, tables.job_name)))
    if wandb.enabled:
        require("wandb", "wandb", "wandb")
        openers.append(lambda: WandbWriter(wandb.project, wandb.group, wandb.team))
    if comet.enabled:
        require("comet_ml", "comet", "comet_ml")
        names = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
        options = {name: getattr(comet, name) for name in names}
        openers.append(lambda: CometWriter(options, comet.experiment_name, comet.samples_log_interval))
    return Curves([opener() for opener in openers] if rank == 0 else [])
