"""`checkpoint.format: "deepspeed"`: every checkpoint has DeepSpeed's files beside ours, of the same save."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from harness.train.deepspeed_runs import ACCUMULATION, batch_of, build_model, config_of, parameter_groups
from harness.train.ranks import run_on_ranks

import launcher
from launcher.base.errors import CheckpointError, ConfigError
from launcher.checkpoint.formats.deepspeed import open_deepspeed
from launcher.checkpoint.formats.native import NativeSource
from launcher.checkpoint_files.folder import is_deepspeeds
from launcher.checkpoint_files.retention import leftovers
from launcher.checkpoint_files.verify import verify


def _engine(stage: int, **section: Any) -> Any:
    model = build_model()
    config = config_of(stage, "bf16", {"checkpoint": {"format": "deepspeed", **section}})
    return launcher.initialize(model=model, model_parameters=parameter_groups(model), config=config)[0]


def _step(engine: Any, rank: int, step: int) -> None:
    for micro_step in range(step * ACCUMULATION, (step + 1) * ACCUMULATION):
        engine.backward(engine(*batch_of(rank, micro_step)))
        engine.step()


def _saved_twice(rank: int, world_size: int, folder: str, stage: int, is_async: bool) -> list[str]:
    """Save, and two steps later once more under the same tag; then load what DeepSpeed's files have no part in."""
    engine = _engine(stage, **{"async": is_async})
    _step(engine, rank, 0)
    engine.save_checkpoint(folder, tag="kept")
    engine.wait_for_checkpoint()
    names = sorted(each.name for each in Path(folder, "kept").glob("*.pt"))
    _step(engine, rank, 1)
    engine.save_checkpoint(folder, tag="kept")
    engine.wait_for_checkpoint()
    path, _ = engine.load_checkpoint(folder)
    assert path == str(Path(folder, "kept"))
    assert engine.global_steps == 2
    engine.destroy()
    return names


@pytest.mark.parametrize(("stage", "is_async"), [(2, False), (3, True)])
def test_files_are_those_of_the_last_save(tmp_path: Path, stage: int, is_async: bool) -> None:
    names = run_on_ranks(2, _saved_twice, str(tmp_path), stage, is_async)[0]
    models = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)]
    states = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    assert names == sorted(states + (models if stage == 3 else ["mp_rank_00_model_states.pt"]))
    path = tmp_path / "kept"
    theirs, ours = open_deepspeed(tmp_path), NativeSource(path)  # by the names of the first save
    assert theirs.state.global_steps == ours.state.global_steps == 2
    assert theirs.state.config["zero_optimization"]["stage"] == stage
    for name, stored in ours.params.items():
        for key in ("weight", *stored.states):
            values = [torch.empty(stored.numel) for _ in range(2)]
            for source, out in zip((ours, theirs), values, strict=True):
                source.read(key, name, 0, out)
            assert values[0].equal(values[1]), (key, name)
    assert verify(path) == []
    assert leftovers(tmp_path) == []
    counted = [name for name in ours.manifest.files if is_deepspeeds(name)]
    assert {os.stat(path / name).st_ino for name in counted} == {os.stat(path / name).st_ino for name in names}
    (path / counted[0]).write_bytes((path / counted[0]).read_bytes()[:-1] + b"x")
    assert [each.file for each in verify(path)] == [str(path / counted[0])]


def _saved_then_without(rank: int, world_size: int, folder: str) -> None:
    engine = _engine(1)
    _step(engine, rank, 0)
    engine.save_checkpoint(folder, tag="kept")
    other = launcher.initialize(model=build_model(), config=config_of(1, "fp32", {}))[0]
    _step(other, rank, 0)
    other.save_checkpoint(folder, tag="kept")
    assert not list(Path(folder, "kept").glob("*.pt"))  # of another save than ours are now
    failing = mock.patch("launcher.checkpoint.deepspeed_files.pickled.torch.save", side_effect=OSError(28, "full"))
    _step(engine, rank, 1)
    with failing if rank == 1 else contextlib.nullcontext(), pytest.raises(CheckpointError, match="rank 1: full"):
        engine.save_checkpoint(folder, tag="next")
    assert not Path(folder, "next").exists()
    engine.destroy()
    other.destroy()


def test_no_file_is_left_of_another_save_or_one_that_failed(tmp_path: Path) -> None:
    run_on_ranks(2, _saved_then_without, str(tmp_path))
    assert verify(tmp_path / "kept") == []
    assert leftovers(tmp_path) == []


def test_where_it_cannot_be_is_said() -> None:
    with pytest.raises(ConfigError, match="DeepSpeed's files are made of those of all ranks"):
        _engine(1, use_node_local_storage=True)
    engine = _engine(1)
    try:
        with pytest.raises(CheckpointError, match=r"checkpoint\.format deepspeed and a folder in a store exclude"):
            engine.save_checkpoint("memory://bucket/run")
    finally:
        engine.destroy()
