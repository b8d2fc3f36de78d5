"""Curves arrive where the config says: real event files and tables, and the calls other libraries get."""

from __future__ import annotations

import csv
import importlib
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.launch.command import ROOT
from harness.needs import need, need_module
from harness.train.ranks import run_on_ranks
from torch import nn

import launcher
from launcher.base.errors import EngineError
from launcher.monitor.curves import CometWriter, CsvWriter, Curves, Event, TensorBoardWriter, WandbWriter


def config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "scheduler": {"type": "ExponentialLR", "params": {"gamma": 0.5}},
        **more,
    }


def train(settings: dict[str, Any], num_steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    engine, *_ = launcher.initialize(model=nn.Linear(3, 1), config=settings)
    losses = []
    for _ in range(num_steps):
        loss = engine(torch.ones(2, 3)).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_csv_files_have_deepspeeds_names(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    losses = train(config(csv_monitor=section, wall_clock_breakdown=True))
    found = rows(tmp_path / "job" / "Train_Samples_train_loss.csv")
    assert found[0] == ["step", "train_loss"]
    assert [int(step) for step, _ in found[1:]] == [2, 4, 6, 8]
    assert [float(value) for _, value in found[1:]] == pytest.approx(losses)
    rates = [float(value) for _, value in rows(tmp_path / "job" / "Train_Samples_lr.csv")[1:]]
    assert rates == pytest.approx([0.05, 0.025, 0.0125, 0.00625])
    times = rows(tmp_path / "job" / "Train_Samples_elapsed_time_ms_backward.csv")
    assert [int(step) for step, _ in times[1:]] == [4, 8]
    assert all(0 < float(value) < 10_000 for _, value in times[1:])


def test_a_script_adds_points_by_the_engine(tmp_path: Path) -> None:
    settings = config(csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "job"})
    engine, *_ = launcher.initialize(model=nn.Linear(3, 1), config=settings)
    assert engine.monitor.enabled
    engine.monitor.write_events([("Test/accuracy", torch.tensor(0.5), 8), ("Test/accuracy", 0.75, 16)])
    (path,) = (tmp_path / "job").glob("*accuracy*.csv")
    assert rows(path)[1:] == [["8", "0.5"], ["16", "0.75"]]
    assert not launcher.initialize(model=nn.Linear(3, 1), config=config())[0].monitor.enabled


def test_a_restarted_run_goes_on_in_its_table(tmp_path: Path) -> None:
    for start in (0, 10):
        writer = CsvWriter(tmp_path)
        writer.write([Event("a/b", 1.0, start)])
        writer.close()
    assert rows(tmp_path / "a_b.csv") == [["step", "b"], ["0", "1.0"], ["10", "1.0"]]


def _train_rank(rank: int, world_size: int, folder: str) -> list[float]:
    section = {"enabled": True, "output_path": f"{folder}/{rank}"}
    return train(config(csv_monitor=section, zero_optimization={"stage": 2}))


def test_only_rank_0_writes(tmp_path: Path) -> None:
    run_on_ranks(2, _train_rank, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    need_module("tensorboard")
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    writers = []
    original = TensorBoardWriter.__init__

    def remember(self: TensorBoardWriter, *args: Any, **kwargs: Any) -> None:
        writers.append(self)
        original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorBoardWriter, "__init__", remember)
        losses = train(config(tensorboard=section))
    writers[0].close()
    events = accumulator.EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    found = events.Scalars("Train/Samples/train_loss")
    assert [event.step for event in found] == [2, 4, 6, 8]
    assert [event.value for event in found] == pytest.approx(losses)
    assert len(events.Scalars("Train/Samples/lr")) == 4


def test_a_missing_library_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match="wandb is enabled, but wandb is not installed") as caught:
        train(config(wandb={"enabled": True}))
    assert caught.value.diagnostics[0].hint == "pip install wandb"


def test_a_full_disk_ends_a_curve_and_no_training() -> None:
    class Failing:
        def write(self, events: Any) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise AssertionError("it was dropped")

    recorder = Recorder()
    curves = Curves([Failing(), recorder])  # type: ignore[list-item]
    for num_samples in (1, 2):
        curves.write({"lr": 0.1}, num_samples)
    curves.close()
    assert [name for name, _, _ in recorder.calls] == ["write", "write", "close"]


class Recorder:
    """Remembers every call of itself or its attributes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((name, args, kwargs))
            return self

        return call


def test_wandb_gets_one_call_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B drops points of a step that it has left behind."""
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=recorder.init))
    curves = Curves([WandbWriter("project", "group", "team")])
    curves.write({"train_loss": 2.0, "lr": 0.1}, 8)
    curves.close()
    assert recorder.calls == [
        ("init", (), {"project": "project", "group": "group", "entity": "team"}),
        ("log", ({"Train/Samples/train_loss": 2.0, "Train/Samples/lr": 0.1},), {"step": 8}),
        ("finish", (), {}),
    ]


def test_comet_gets_points_at_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "comet_ml", types.SimpleNamespace(start=recorder.start))
    writer = CometWriter({"project": "p"}, "name", 100)
    for num_samples in (8, 60, 108, 150, 300):
        writer.write([Event("loss", 1.0, num_samples)])
    writer.close()
    assert recorder.calls[:2] == [("start", (), {"project": "p"}), ("set_name", ("name",), {})]
    assert [call[2]["step"] for call in recorder.calls if call[0] == "log_metric"] == [8, 108, 300]
    assert recorder.calls[-1][0] == "end"


def run_beside(tmp_path: Path, code: str) -> list[str]:
    """Run a program that sees the packages of .ci/test-curves.txt; return the lines that it prints."""
    folder = Path(sys.prefix, "curves")
    need(None if (folder / "mlflow").is_dir() else f"there is no {folder}: `make test` installs .ci/test-curves.txt")
    env = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "TRACKIO_DIR": str(tmp_path)}
    text = f"import sys\nsys.path.append({str(folder)!r})\n" + textwrap.dedent(code)
    command = [sys.executable, "-c", text]
    env = {**os.environ, **env, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout.splitlines()


def test_mlflow_gets_the_curves_of_a_run(tmp_path: Path) -> None:
    """Of a new run, or of the one that the script has begun; a store that cannot be used is an error that says so."""
    code = """
        from launcher.base.errors import EngineError
        from launcher.config.load import load_config
        from launcher.monitor.curves import Event, MlflowWriter, open_curves
        uri = "file:store"
        section = {"enabled": True, "tracking_uri": uri, "experiment_name": "tests", "run_name": "first"}
        assert not open_curves(load_config({"mlflow": section}).config, rank=1)
        assert "mlflow" not in sys.modules
        curves = open_curves(load_config({"mlflow": section}).config, rank=0)
        for num_samples in (2, 4):
            curves.write({"train_loss": num_samples / 2, "lr": 0.1}, num_samples)
        curves.write_events([(f"Test/what = {number % 2}?", float("nan"), number) for number in range(2500)])
        curves.close()

        import mlflow
        client = mlflow.MlflowClient(uri)
        experiment = client.get_experiment_by_name("tests")
        (run,) = client.search_runs([experiment.experiment_id])
        assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
        points = client.get_metric_history(run.info.run_id, "Train/Samples/train_loss")
        assert [(point.step, point.value) for point in points] == [(2, 1.0), (4, 2.0)]
        assert len(client.get_metric_history(run.info.run_id, "Test/what _ 1_")) == 1250
        assert mlflow.active_run() is None, "a script may begin a run of its own"

        mlflow.set_tracking_uri(uri)
        with mlflow.start_run() as run:
            writer = MlflowWriter("file:elsewhere", "tests", None)
            writer.write([Event("loss", 0.5, 8)])
            writer.close()
            assert client.get_run(run.info.run_id).info.status == "RUNNING"
            assert [each.value for each in client.get_metric_history(run.info.run_id, "loss")] == [0.5]
        try:
            MlflowWriter("nothing://of/this/kind", "tests", None)
        except EngineError as error:
            print(error)
    """
    assert run_beside(tmp_path, code)[-1].startswith("mlflow: ")


def test_trackio_gets_the_curves_of_a_run_and_a_restart_continues_it(tmp_path: Path) -> None:
    code = """
        import os
        from launcher.config.load import load_config
        from launcher.monitor.curves import open_curves
        section = {"enabled": True, "project": "project", "run_name": "name"}
        for start in (0, 16):
            curves = open_curves(load_config({"trackio": section}).config, rank=0)
            for num_samples in (start + 8, start + 16):
                curves.write({"train_loss": 1.5, "lr": 0.1}, num_samples)
            curves.close()
        import trackio
        assert len(trackio.Api().runs("project")) == 1
        rows = trackio.SQLiteStorage.get_logs("project", "name")
        print([(row["step"], row["Train/Samples/train_loss"], row["Train/Samples/lr"]) for row in rows])
    """
    assert run_beside(tmp_path, code)[-1] == str([(step, 1.5, 0.1) for step in (8, 16, 24, 32)])


@pytest.mark.parametrize("section", ["mlflow", "trackio"])
def test_a_missing_library_of_an_extra_is_named_with_the_extra(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=f"{section} is enabled, but {section} is not installed") as caught:
        train(config(**{section: {"enabled": True}}))
    assert caught.value.diagnostics[0].hint == f"pip install 'launch-zero[{section}]'"


def test_no_library_is_imported_where_its_section_is_off() -> None:
    code = (
        "import sys, launcher.monitor.curves as curves\n"
        "from launcher.config.load import load_config\n"
        "curves.open_curves(load_config({}).config, 0)\n"
        "print({name for name in ('mlflow', 'trackio', 'wandb', 'comet_ml', 'tensorboard') if name in sys.modules})\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert found.stdout.splitlines()[-1] == "set()"
