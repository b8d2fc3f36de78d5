"""`launch plan` as users type it: a model on GPUs of the table or on probed machines. Scripts: `tests/rehearse`."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner, Result

from launcher.base.errors import UsageError
from launcher.cli.commands import probe
from launcher.cli.main import cli
from launcher.config.load import load_config
from launcher.planner.speed import CollectiveSpeed, RankSpeed, Speed

H100 = ("--gpu", "H100-80GB", "--num-gpus", "8")


def plan(*words: Any, cache: Path | None = None) -> Result:
    env = {} if cache is None else {"XDG_CACHE_HOME": str(cache)}
    return CliRunner().invoke(cli, ["plan", *map(str, words)], prog_name="launch", env=env)


def test_a_model_on_gpus_of_the_table() -> None:
    result = plan("7B", *H100, "--rows", "3")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == "7B · 7.0G parameters · 1 node × 8 ranks · H100-80GB"
    assert lines[1].startswith("256 samples a step of 4,096 tokens · bf16 (fp32 master) · 32 layers")
    assert sum(line.startswith((" 1 ", " 2 ", " 3 ")) for line in lines) == 3
    assert "the guides' decision tree says: one node, the model does not fit a GPU" in result.output
    assert "run it: launch --num-gpus 8 train.py --deepspeed ds_config.json" in result.output


def test_the_config_that_is_written_is_that_of_the_row(tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text(json.dumps({"gradient_clipping": 0.5, "train_batch_size": 64}))
    target = tmp_path / "ds.json"
    options = ("--config", tmp_path / "base.json", "--write", target, "--row", "2", "--json")
    result = plan(*H100, "--num-nodes", "2", *options, "1.3B")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    written = json.loads(target.read_text())
    assert found["global_batch"] == 64
    assert {**found["rows"][1]["config"], "gradient_clipping": 0.5} == written
    assert load_config(target, world_size=16).config.train_batch_size == 64
    assert found["rows"][0]["step_s"] <= found["rows"][1]["step_s"]
    assert sum(found["rows"][0]["parts_s"].values()) == pytest.approx(found["rows"][0]["step_s"])


def test_days_nodes_and_what_if() -> None:
    changes = ("memory=2", "network=0.5", "gpu=A100-40GB", "nodes=2", "seq=2048", "batch=512")
    options = [word for change in changes for word in ("--what-if", change)]
    result = plan(*H100, "--axes", "none", "--tokens", "100B", "--days", "5", *options, "7B")
    assert result.exit_code == 0, result.output
    assert "100.0G tokens: " in result.output
    assert "100.0G tokens in 5 days: " in result.output
    for change in changes:
        assert f"if {change}: stage" in result.output
    few = plan(*H100, "--tokens", "1000T", "--days", "0.01", "--axes", "none", "350M")
    assert few.exit_code == 1
    assert "nodes are enough" in few.output


def test_nothing_fits() -> None:
    result = plan(*H100, "--cpu-memory", "100GB", "--axes", "none", "175B")
    assert result.exit_code == 1
    assert "✗ nothing fits: stage 3" in result.output


def kept(folder: Path, host: str) -> None:
    ranks = [RankSpeed(rank, 0, host, "cpu", {"fp32": 1e11, "bf16": 2e11}, 8e9, kernel_s=1e-5) for rank in range(2)]
    times = [CollectiveSpeed("all_gather", "all ranks", 2, size, 1e-4 + size / 1e9) for size in (2**12, 2**24)]
    with mock.patch.dict("os.environ", {"XDG_CACHE_HOME": str(folder)}):
        assert probe._keep(Speed("2026-01-02 03:04:05", "gloo", ranks, times)) is not None


def test_probed_machines(tmp_path: Path) -> None:
    unknown = plan("350M", cache=tmp_path)
    assert isinstance(unknown.exception, UsageError)
    assert "measure it: launch probe; or name GPUs" in str(unknown.exception)
    kept(tmp_path, socket.gethostname())
    result = plan("--seq", "128", "350M", cache=tmp_path)
    assert result.exit_code == 0, result.output
    assert "1 node × 2 ranks · 2 × cpu, measured 2026-01-02 03:04:05 UTC" in result.output
    (tmp_path / "hosts").write_text("node-a slots=2\n")
    other = plan("--hostfile", tmp_path / "hosts", "350M", cache=tmp_path)
    assert "launch probe --hostfile" in str(other.exception)
    kept(tmp_path, "node-a")
    found = plan("--hostfile", tmp_path / "hosts", "--seq", "128", "350M", cache=tmp_path)
    assert f"run it: launch --hostfile {tmp_path}/hosts train.py" in found.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*H100, "--axes", "rows", "7B"], "none of tensor"),
        ([*H100, "--days", "3", "7B"], "--days needs --tokens"),
        ([*H100, "--row", "999", "350M"], "rows fit"),
        ([*H100, "--global-batch", "3", "--axes", "none", "7B"], "multiple of 8"),
        ([*H100, "--hostfile", "hosts", "7B"], "which machines there are"),
        ([*H100, "--layers", "3", "7B"], "go together"),
        ([*H100, "7B", "more"], "more"),
        ([*H100, "7B", "--row", "999"], "rows fit"),
        (["--gpu", "abacus", "7B"], "no GPU 'abacus'"),
        ([*H100, "--what-if", "memory=-1", "7B"], "not possible"),
    ],
)
def test_what_is_wrong(words: list[str], says: str) -> None:
    result = plan(*words)
    assert result.exit_code != 0
    assert says in str(result.exception) + result.output


def test_a_change_that_is_not_known() -> None:
    result = plan(*H100, "--what-if", "colour=2", "7B")
    assert result.exit_code == 2
    assert "memory=…" in result.output
