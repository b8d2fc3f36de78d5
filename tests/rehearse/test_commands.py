"""`launch rehearse`, `plan` and `tune` as users type them, on a script whose ranks are forks.

That the commands start processes of their own is tested in `tests/cli`.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner, Result
from harness import scripts
from harness.train import rehearsed, trials

from launcher.base.errors import UsageError
from launcher.cli import script_plan
from launcher.cli.commands import rehearse, tune
from launcher.cli.main import cli
from launcher.planner.speed import CollectiveSpeed, RankSpeed, Speed, kept_file
from launcher.planner.tuning import kept_factors

TRAIN = """
    import sys, torch, launcher
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    engine, *_ = launcher.initialize(model=model, config=sys.argv[2])
    while True:
        engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 256)).mean())
        engine.step()
"""
CONFIG = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "gradient_clipping": 0.5,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working folder, with a script and its config."""
    scripts.write(tmp_path, TRAIN, "train.py")
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_rank = rehearsed.in_forks(tmp_path)
    with mock.patch.object(rehearse, "run_rank", run_rank), mock.patch.object(script_plan, "run_rank", run_rank):
        yield tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, [*words, "train.py", "--deepspeed", "ds.json"], prog_name="launch")


def test_ranks_of_all_roles_are_rehearsed(folder: Path) -> None:
    (folder / "ds.json").write_text(json.dumps({**CONFIG, "zero_optimization": {"stage": 3}}))
    result = run("rehearse", "--ranks", "16")
    assert result.exit_code == 0, result.output
    assert "rehearsing rank 15, too" in result.output
    assert "the 2 rehearsed ranks issue the same collectives in the same order" in result.output


def test_a_script_is_planned(folder: Path) -> None:
    """It is rehearsed: its own model, batch and config, and the exact bytes of the rows."""
    options = ("--gpu", "A100-40GB", "--num-gpus", "2")
    result = run("plan", *options, "--rows", "1", "--write", "best.json")
    assert result.exit_code == 0, result.output
    assert "8 samples a step · fp32" in result.output
    assert "* as rehearsed" in result.output
    assert "--deepspeed best.json" in result.output
    written = json.loads((folder / "best.json").read_text())
    assert (written["train_batch_size"], written["gradient_clipping"]) == (8, 0.5)
    scripts.write(folder, "raise ValueError('no data')", "train.py")
    failing = run("plan", *options)
    assert isinstance(failing.exception, UsageError)
    assert "the script cannot be rehearsed: ValueError: no data" in str(failing.exception)


def test_settings_are_tried_in_the_order_of_a_plan(folder: Path) -> None:
    """Where the machines were probed, settings are those of a plan, and what it predicts is corrected by what runs."""
    ranks = [RankSpeed(rank, 0, socket.gethostname(), "cpu", {"fp32": 1e11}, 8e9, kernel_s=1e-5) for rank in range(2)]
    times = [CollectiveSpeed("all_gather", "all ranks", 2, size, 1e-4 + size / 1e9) for size in (2**12, 2**24)]
    speed = Speed("2026-01-02 03:04:05", "gloo", ranks, times)
    path = kept_file(speed.key)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(speed.as_json()))
    with mock.patch.object(tune, "run_trial", side_effect=trials.in_forks(folder)):
        result = run("tune", "--num-gpus", "2", "--steps", "2", "--candidates", "2", "--json", "found.json")
    assert result.exit_code == 0, result.output
    assert "predicted step" in result.output
    tried = [each["trial"] for each in json.loads((folder / "found.json").read_text())["trials"]]
    assert len(tried) == 3
    assert all(trial["predicted_s"] > 0 and trial["parts"]["update"] > 0 for trial in tried)
    assert tried[0]["patch"] == {}
    assert tried[1]["predicted_s"] <= tried[2]["predicted_s"]
    learnt = kept_factors(speed.key)
    assert learnt is not None
    assert learnt.num_outcomes == 3
