"""`launch checkpoint inspect`, `verify` and `prune`."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import click
from click.testing import CliRunner, Result
from harness.checkpoints import write_checkpoint
from harness.launch.command import run_here

from launcher.checkpoint_files.retention import MIN_AGE_S
from launcher.cli.main import cli


def checkpoint(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["checkpoint", *map(str, words)])


def test_inspect_lists_the_checkpoints_of_a_folder(tmp_path: Path) -> None:
    for step in (2, 10):
        write_checkpoint(tmp_path, step)
    result = checkpoint("inspect", tmp_path)
    assert result.exit_code == 0, result.output
    header, first, second, total = result.output.splitlines()
    assert header.split()[:5] == ["TAG", "STEP", "SAVED", "SIZE", "RANKS"]
    assert first.startswith("global_step2 ")
    assert " ".join(second.split()).endswith("2 2 bfloat16 AdamW 2 (33) latest")
    assert total.startswith(f"{tmp_path}: 2 checkpoints, ")


def test_inspect_shows_one_checkpoint_and_its_parameters(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 4)
    result = checkpoint("inspect", folder, "--params")
    assert result.exit_code == 0, result.output
    assert "global_step4 · step 4" in result.output
    assert "by 2 ranks at ZeRO stage 2" in result.output
    assert "global steps 4, global samples 32" in result.output
    rows = [line.split() for line in result.output.splitlines()]
    assert ["0", "embed.weight", "7×4", "28", "bfloat16", "exp_avg,", "step"] in rows


def test_inspect_as_json_is_complete(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 2)
    broken = write_checkpoint(tmp_path, 4)
    (broken / "state.json").write_text("{}")
    assert checkpoint("inspect", tmp_path).exit_code == checkpoint("inspect", tmp_path, "--params").exit_code == 1
    assert checkpoint("inspect", tmp_path / "global_step2").exit_code == 0
    result = checkpoint("inspect", tmp_path, "--params", "--json")
    assert result.exit_code == 1
    found = json.loads(result.output)
    (only,) = found["checkpoints"]
    assert (only["tag"], only["step"], only["world_size"], only["stage"]) == ("global_step2", 2, 2, 2)
    assert (only["optimizer"], only["num_params"], only["numel"]) == ("AdamW", 2, 33)
    assert only["params"][1] == {
        "name": "head.bias",
        "shape": [5],
        "dtype": "bfloat16",
        "is_trainable": True,
        "unit": 0,
        "states": ["exp_avg", "step"],
        "numel": 5,
    }
    assert list(found["damaged"]) == ["global_step4"]


def test_verify_names_the_damaged_file_and_ends_with_1(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 2)
    folder = write_checkpoint(tmp_path, 10)
    result = checkpoint("verify", tmp_path)
    assert result.exit_code == 0
    assert [line.split() for line in result.output.splitlines()] == [["global_step2", "ok"], ["global_step10", "ok"]]
    damaged = folder / "rank-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    result = checkpoint("verify", folder)
    assert result.exit_code == 1
    assert f"{damaged}: it is damaged" in click.unstyle(result.output)
    result = checkpoint("verify", tmp_path, "--json")
    assert result.exit_code == 1
    found = json.loads(result.output)
    assert not found["ok"]
    assert [len(each["findings"]) for each in found["checkpoints"]] == [0, 1]
    assert found["checkpoints"][1]["findings"][0]["file"] == str(damaged)


def test_a_folder_without_checkpoints_is_an_error(tmp_path: Path) -> None:
    result = run_here(tmp_path, "checkpoint", "verify", tmp_path)
    assert result.code == 1
    assert f"✗ {tmp_path}: there is no checkpoint of launch" in result.err


def test_prune_removes_what_it_says(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step in (2, 4, 6, 8):
        write_checkpoint(root, step)
    (root / ".global_step9.tmp").mkdir()
    (root / ".global_step11.tmp").mkdir()
    old_s = time.time() - MIN_AGE_S - 60
    os.utime(root / ".global_step9.tmp", (old_s, old_s))
    words = ("prune", root, "--keep_last", "1", "--keep-every", "4")
    planned = checkpoint(*words, "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert sorted(path.name for path in root.glob("global_*")) == [f"global_step{step}" for step in (2, 4, 6, 8)]
    done = checkpoint(*words)
    now, before = (re.sub(r"\d+ s ago", "N s ago", each.output) for each in (done, planned))
    assert now.replace("removed", "would remove") == before
    gone = [line.split()[1] for line in done.output.splitlines() if line.startswith("removed /")]
    assert gone == [str(root / name) for name in ("global_step2", "global_step6", ".global_step9.tmp")]
    assert ".global_step11.tmp was written to N s ago: left alone" in now
    assert sorted(path.name for path in root.iterdir()) == [
        ".global_step11.tmp",
        "global_step4",
        "global_step8",
        "latest",
    ]
    assert checkpoint("prune", root).output.splitlines()[-1] == "nothing to remove"


def test_prune_without_a_number_keeps_every_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 2)
    assert checkpoint("prune", tmp_path).output == "nothing to remove\n"
    result = run_here(tmp_path, "checkpoint", "prune", tmp_path, "--keep-every", "5")
    assert result.code == 2
    assert "--keep-every goes with --keep-last" in result.err
    result = run_here(tmp_path, "checkpoint", "prune", tmp_path / "global_step2")
    assert result.code == 2
    assert f"name the folder it is in: {tmp_path}" in result.err
