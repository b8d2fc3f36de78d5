"""Where training curves go: TensorBoard, CSV files, W&B, Comet, MLflow, Trackio, each through its own library.

Event names, folders and the x axis (samples) are DeepSpeed's, so that dashboards built for it keep working.
"""

from __future__ import annotations

import atexit
import contextlib
import csv
import importlib
import importlib.util
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.config.schema import Config

_MLFLOW_BATCH = 1000  # points that MLflow takes at once
_NO_MLFLOW_NAME = re.compile(r"[^\w.\- :/]")
FLUSH_INTERVAL_S = 5.0  # a job that is killed loses at most this much of its curves


@dataclass(frozen=True)
class Event:
    """One point of a curve."""

    name: str  # such as Train/Samples/train_loss
    value: float
    num_samples: int  # seen by all ranks so far


class Writer(Protocol):
    """Takes points to one place. Only rank 0 has writers."""

    def write(self, events: Sequence[Event]) -> None:
        """Add points."""
        ...

    def flush(self) -> None:
        """Have readers see all points, where the place allows it."""
        ...

    def close(self) -> None:
        """Make sure that all points have arrived; nothing is written after it."""
        ...


def require(module: str, section: str, package: str, wanted: str | None = None) -> None:
    """Check that the library of a config section is installed, without importing it. Raises: EngineError.

    wanted: what pip is to install, where that is not the package by its name.
    """
    if importlib.util.find_spec(module) is None:
        hint = f"pip install {wanted or package}"
        raise EngineError(f"{section} is enabled, but {package} is not installed", hint=hint)


def log_folder(output_path: str, job_name: str) -> Path:
    """Return the folder of a run's curves, made if needed. Raises: EngineError when it cannot be."""
    folder = Path(output_path).expanduser() / job_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EngineError(f"{folder}: {error.strerror}", hint="choose another output_path") from error
    return folder


def _by_step(events: Sequence[Event]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for event in events:
        found.setdefault(event.num_samples, {})[event.name] = event.value
    return found


class TensorBoardWriter:
    """Event files that `tensorboard --logdir` reads."""

    def __init__(self, folder: Path) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self.summary_writer: Any = module.SummaryWriter(log_dir=str(folder))
        self._flushed_s = time.monotonic()

    def write(self, events: Sequence[Event]) -> None:
        """Add points."""
        for event in events:
            self.summary_writer.add_scalar(event.name, event.value, event.num_samples)
        if time.monotonic() - self._flushed_s >= FLUSH_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Write what is left to the file."""
        self.summary_writer.flush()
        self._flushed_s = time.monotonic()

    def close(self) -> None:
        """Write what is left."""
        self.summary_writer.close()


class CsvWriter:
    """One file a curve, `Train_Samples_train_loss.csv`, with the columns step (samples) and value."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, TextIO] = {}

    def write(self, events: Sequence[Event]) -> None:
        """Append rows; they are readable at once."""
        for event in events:
            file = self._file(event.name)
            csv.writer(file).writerow([event.num_samples, event.value])
            file.flush()

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            path = self._folder / (name.replace("/", "_").replace(" ", "_") + ".csv")
            file = path.open("a", newline="")
            if file.tell() == 0:  # a restarted job continues in its file
                csv.writer(file).writerow(["step", name.rpartition("/")[2]])
            self._files[name] = file
        return self._files[name]

    def flush(self) -> None:
        """Do nothing: each row is written at once."""

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


class WandbWriter:
    """A run of Weights & Biases; without network set WANDB_MODE=offline."""

    def __init__(self, project: str, group: str | None, team: str | None) -> None:
        self._wandb: Any = importlib.import_module("wandb")
        self._run = self._wandb.init(project=project, group=group, entity=team)

    def write(self, events: Sequence[Event]) -> None:
        """Add points; those of one step in one call, because W&B takes each step once."""
        for num_samples, values in _by_step(events).items():
            self._run.log(values, step=num_samples)

    def flush(self) -> None:
        """Do nothing: the library uploads by itself."""

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


class CometWriter:
    """An experiment of Comet; each curve gets a point every `interval` samples."""

    def __init__(self, start_options: dict[str, Any], experiment_name: str | None, interval: int) -> None:
        self.experiment: Any = importlib.import_module("comet_ml").start(**start_options)
        if experiment_name is not None:
            self.experiment.set_name(experiment_name)
        self._interval = interval
        self._written_at: dict[str, int] = {}

    def write(self, events: Sequence[Event]) -> None:
        """Add the points that are due."""
        for event in events:
            last = self._written_at.get(event.name)
            if last is None or event.num_samples - last >= self._interval:
                self._written_at[event.name] = event.num_samples
                self.experiment.log_metric(event.name, event.value, step=event.num_samples)

    def flush(self) -> None:
        """Do nothing: the library uploads by itself."""

    def close(self) -> None:
        """Upload what is left."""
        self.experiment.end()


class MlflowWriter:
    """A run of MLflow: the script's own one where it has begun one, else a new one. A thread of MLflow sends points."""

    def __init__(self, tracking_uri: str | None, experiment_name: str, run_name: str | None) -> None:
        """Raises: EngineError when the store or server cannot be used."""
        # One thread: several make the folder of a metric at once, and those that come second lose their points.
        os.environ.setdefault("MLFLOW_ASYNC_LOGGING_THREADPOOL_SIZE", "1")
        module = importlib.import_module("mlflow")
        self._error: type[Exception] = module.exceptions.MlflowException
        self._metric: Any = importlib.import_module("mlflow.entities").Metric
        active = module.active_run()
        self._is_own = active is None
        try:
            # A client, and no run that is active in this process: the script may begin one later.
            self._client: Any = module.MlflowClient(tracking_uri if self._is_own else None)
            self._run_id = active.info.run_id if active is not None else self._new_run(experiment_name, run_name)
        except self._error as error:
            hint = "choose another tracking_uri, or set MLFLOW_TRACKING_URI"
            raise EngineError(f"mlflow: {error}", hint=hint) from error
        self._points: list[Any] = []  # that are not sent
        self._last: Any = None  # what the thread was given last
        self._flushed_s = time.monotonic()

    def _new_run(self, experiment_name: str, run_name: str | None) -> str:
        experiment = self._client.get_experiment_by_name(experiment_name)
        number = self._client.create_experiment(experiment_name) if experiment is None else experiment.experiment_id
        return str(self._client.create_run(number, run_name=run_name).info.run_id)

    def write(self, events: Sequence[Event]) -> None:
        """Add points. Does not wait for the server."""
        time_ms = int(time.time() * 1000)
        for event in events:
            name = _NO_MLFLOW_NAME.sub("_", event.name)
            self._points.append(self._metric(name, event.value, time_ms, event.num_samples))
        if time.monotonic() - self._flushed_s >= FLUSH_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Give all points to the thread that sends them."""
        points, self._points, self._flushed_s = self._points, [], time.monotonic()
        try:
            for start in range(0, len(points), _MLFLOW_BATCH):
                batch = points[start : start + _MLFLOW_BATCH]
                self._last = self._client.log_batch(self._run_id, metrics=batch, synchronous=False)
        except self._error as error:
            raise OSError(f"mlflow: {error}") from error

    def close(self) -> None:
        """Wait until all points have been sent; end the run, unless it is the script's."""
        try:
            self.flush()
            if self._last is not None:
                self._last.wait()
            if self._is_own:
                self._client.set_terminated(self._run_id)
        except (OSError, self._error) as error:
            get_logger().warning("curves may be missing in MLflow: %s", error)


class TrackioWriter:
    """A run of Trackio, on this machine or in a Space. A thread of Trackio sends points."""

    def __init__(self, project: str, run_name: str | None, space_id: str | None) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        # A restart that has the name of the run before it continues it.
        self._run: Any = self._trackio.init(project=project, name=run_name, space_id=space_id, resume="allow")

    def write(self, events: Sequence[Event]) -> None:
        """Add points; those of one step in one call, because each call is a row."""
        for num_samples, values in _by_step(events).items():
            self._run.log(values, step=num_samples)

    def flush(self) -> None:
        """Do nothing: the library sends by itself."""

    def close(self) -> None:
        """Send what is left."""
        with contextlib.suppress(RuntimeError):  # the script has finished it
            self._trackio.finish()


# ---- Which writers a config asks for ----


PREFIX = "Train/Samples/"


class Curves:
    """Gives every point to all writers, and closes them when the process ends. A writer whose disk fails is dropped."""

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = writers
        self._behind: tuple[Callable[[], dict[str, float]], int] | None = None  # what is written before anything else
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

    def write_behind(self, values: Callable[[], dict[str, float]], num_samples: int) -> None:
        """Add what `values` returns, which may wait for a device, when the next points are added or all are closed."""
        self._write_behind()
        self._behind = (values, num_samples)

    def _write_behind(self) -> None:
        behind, self._behind = self._behind, None
        if behind is not None:
            values, num_samples = behind
            self.write(values(), num_samples)

    def write_points(self, events: Sequence[Event]) -> None:
        """Add points of any curves."""
        self._write_behind()
        for writer in self._writers:
            try:
                writer.write(events)
            except OSError as error:  # a full disk must not end a training
                get_logger().warning("%s stopped: %s", type(writer).__name__, error)
                self._writers = [other for other in self._writers if other is not writer]

    def close(self) -> None:
        """Bring all points home."""
        self._write_behind()
        writers, self._writers = self._writers, ()
        for writer in writers:
            writer.close()
        atexit.unregister(self.close)


def open_curves(settings: Config, rank: int) -> Curves:
    """Open the writers of the sections that are enabled, on rank 0. Every rank must call it.

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
    mlflow, trackio = settings.mlflow, settings.trackio
    if mlflow.enabled:
        require("mlflow", "mlflow", "mlflow", "'launch-zero[mlflow]'")
        openers.append(lambda: MlflowWriter(mlflow.tracking_uri, mlflow.experiment_name, mlflow.run_name))
    if trackio.enabled:
        require("trackio", "trackio", "trackio", "'launch-zero[trackio]'")
        openers.append(lambda: TrackioWriter(trackio.project, trackio.run_name, trackio.space_id))
    return Curves([opener() for opener in openers] if rank == 0 else [])
