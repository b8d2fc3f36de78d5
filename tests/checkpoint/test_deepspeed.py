"""Checkpoints of the real DeepSpeed are read to the bit and imported, and the run continues as DeepSpeed continues it.

One file, such that DeepSpeed runs once for all of these tests.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.train import deepspeed
from harness.train.deepspeed_runs import (
    ACCUMULATION,
    CLIENT_STATE,
    LR,
    NUM_RANKS,
    NUM_STEPS,
    NUM_STEPS_AFTER,
    RUNS,
    batch_of,
    build_model,
    config_of,
    parameter_groups,
)
from harness.train.ranks import run_on_ranks
from torch import Tensor

import launcher
from launcher.base.errors import CheckpointError
from launcher.checkpoint.convert.to_ours import import_deepspeed, run
from launcher.checkpoint.formats.deepspeed import open_deepspeed
from launcher.checkpoint.formats.native import NativeSource
from launcher.checkpoint.formats.source import CheckpointSource

pytestmark = pytest.mark.long  # the real DeepSpeed takes long to import
TAG = f"global_step{NUM_STEPS}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All of `RUNS` by the real DeepSpeed on real ranks, as it saved them in `saved/`, and imported in `imported/`."""
    folder = tmp_path_factory.mktemp("deepspeed")
    deepspeed.run_module(NUM_RANKS, "harness.train.deepspeed_runs", str(folder))
    for name in RUNS:
        import_deepspeed(folder / name / "saved", folder / name / "imported")
    yield folder
    shutil.rmtree(folder)


def memory_of(runs: Path, name: str) -> dict[str, Any]:
    """Return what DeepSpeed had in memory when it saved."""
    found: dict[str, Any] = torch.load(runs / name / "memory.pt")
    return found


def read_whole(source: CheckpointSource, key: str, name: str) -> Tensor:
    """Read a parameter in two pieces that meet within it."""
    shape = source.params[name].shape
    out = torch.empty(torch.Size(shape).numel())
    cut = out.numel() // 3
    source.read(key, name, cut, out[cut:])
    source.read(key, name, 0, out[:cut])
    return out.view(shape)


@pytest.mark.parametrize("name", RUNS)
def test_parameters_and_states_are_what_deepspeed_had_in_memory(runs: Path, name: str) -> None:
    source, memory = open_deepspeed(runs / name / "saved"), memory_of(runs, name)
    model = build_model()
    assert list(source.params) == [each for each, _ in model.named_parameters()]  # tied ones once, buffers not
    for key, param in model.named_parameters():
        stored = source.params[key]
        assert stored.shape == param.shape
        assert stored.dtype == {"fp16": "float16", "bf16": "bfloat16"}.get(RUNS[name][1], "float32")
        assert stored.is_trainable == param.requires_grad
        assert read_whole(source, "weight", key).equal(memory["weights"][key]), key
        if not param.requires_grad:
            assert (stored.group, dict(stored.states)) == (None, {})
            continue
        assert stored.group == (0 if param.dim() > 1 else 1)
        assert dict(stored.states) == {"exp_avg": "float32", "exp_avg_sq": "float32"}
        for state, values in memory["states"][key].items():
            assert values.abs().sum() > 0
            assert read_whole(source, state, key).equal(values), (key, state)
        assert float(stored.scalars["step"]) == memory["step"] >= NUM_STEPS


@pytest.mark.parametrize("name", RUNS)
def test_the_rest_of_the_run_is_read(runs: Path, name: str) -> None:
    state, memory = open_deepspeed(runs / name / "saved").state, memory_of(runs, name)
    for counter in ("global_steps", "global_samples", "micro_steps", "skipped_steps"):
        assert getattr(state, counter) == memory[counter], counter
    assert state.micro_steps == NUM_STEPS * ACCUMULATION
    assert state.optimizer == "AdamW"
    if name == "1-elastic":
        assert state.groups == [{}, {}]  # it saves none
    else:
        assert [group["lr"] for group in state.groups] == memory["lrs"]
        assert [group["weight_decay"] for group in state.groups] == [0.1, 0.0]
        assert all(0 < group["lr"] < LR and "params" not in group for group in state.groups)
    assert state.lr_scheduler == memory["lr_scheduler"]
    client = dict(state.client_state)
    assert client.pop("table").equal(torch.arange(5) * 0.5)
    assert client.pop("options") == {"width": 12}
    assert client == CLIENT_STATE
    assert state.buffers.keys() == memory["buffers"].keys()
    assert all(state.buffers[each].equal(values) for each, values in memory["buffers"].items())
    assert state.config["zero_optimization"]["stage"] == RUNS[name][0]
    assert state.versions == {"deepspeed": "0.19.8"}
    if RUNS[name][1] == "fp16":
        assert state.loss_scaler is not None
        found = {key: state.loss_scaler[key] for key in ("scale", "num_steps")}
        assert found == {"scale": memory["loss_scale"], "num_steps": memory["loss_iterations"]}
    else:
        assert state.loss_scaler is None


def _without(runs: Path, tmp_path: Path, name: str, lost: str) -> Path:
    shutil.copytree(runs / name / "saved", tmp_path / name)
    (tmp_path / name / TAG / lost).unlink()
    return tmp_path / name


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("2-fp32", "mp_rank_00_model_states.pt"),
        ("2-fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("1-bf16", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("3-fp32", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
        ("3-fp32", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("3-fp32", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
    ],
)
def test_a_missing_file_is_named(runs: Path, tmp_path: Path, name: str, lost: str) -> None:
    with pytest.raises(CheckpointError, match=rf"/{lost}: the file is missing"):
        open_deepspeed(_without(runs, tmp_path, name, lost))


def test_a_truncated_file_is_named(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "2-fp32" / "saved", tmp_path / "saved")
    path = next((tmp_path / "saved").glob("*/zero_pp_rank_1_*"))
    path.write_bytes(path.read_bytes()[:-500])
    source = open_deepspeed(tmp_path / "saved")  # only what is needed of it is read
    with pytest.raises(CheckpointError, match=rf"{path.name}: the end of the file is missing; .*another checkpoint"):
        read_whole(source, "weight", "out.weight")


def test_files_of_an_earlier_save_by_more_ranks_are_noticed(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "2-fp32" / "saved", tmp_path / "saved")
    path = next((tmp_path / "saved").glob("*/zero_pp_rank_1_*"))
    shutil.copy(path, path.with_name(path.name.replace("rank_1", "rank_2")))
    with pytest.raises(CheckpointError, match=r"zero_pp_rank_2.*: the file is of another save: .* 2 ranks"):
        open_deepspeed(tmp_path / "saved")


@pytest.mark.parametrize("name", RUNS)
def test_what_is_imported_is_what_was_saved(runs: Path, name: str) -> None:
    saved, imported = open_deepspeed(runs / name / "saved"), NativeSource(runs / name / "imported" / TAG)
    assert list(imported.params) == list(saved.params)
    for key, stored in saved.params.items():
        found = imported.params[key]
        assert (found.shape, found.dtype, found.group) == (stored.shape, stored.dtype, stored.group)
        assert found.states == stored.states
        assert found.scalars.keys() == stored.scalars.keys()
        assert all(torch.as_tensor(found.scalars[each]).equal(value) for each, value in stored.scalars.items())
        for state in ("weight", *stored.states):
            ours, theirs = torch.empty(stored.numel), torch.empty(stored.numel)
            imported.read(state, key, 0, ours)
            saved.read(state, key, 0, theirs)
            assert ours.equal(theirs), (state, key)
    ours, theirs = (vars(source.state).copy() for source in (imported, saved))
    for each in (ours, theirs):
        each["table"] = each["client_state"].pop("table").tolist()
        each["buffers"] = {key: value.tolist() for key, value in each["buffers"].items()}
    assert ours == theirs
    assert imported.facts["tied"] == {"head.weight": "embed.weight"}


def _continued(rank: int, world_size: int, folder: str, name: str, stage: int) -> dict[str, Any]:
    model = build_model()
    precision, options = RUNS[name][1:]
    zero = {key: value for key, value in options.get("zero", {}).items() if key != "parameter_alignment"}
    config = config_of(stage, precision, {**options, "zero": zero})
    engine, *_ = launcher.initialize(model=model, model_parameters=parameter_groups(model), config=config)
    path, client_state = engine.load_checkpoint(folder)
    counters = (engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps)
    rates = engine.get_lr()
    losses = []
    for micro_step in range(NUM_STEPS * ACCUMULATION, (NUM_STEPS + NUM_STEPS_AFTER) * ACCUMULATION):
        loss = engine(*batch_of(rank, micro_step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    scale = None if name != "2-fp16" else engine.optimizer.loss_scale
    engine.destroy()
    return {
        "path": path, "epoch": client_state["epoch"], "counters": counters, "rates": rates, "losses": losses,
        "scale": scale,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "stage", "tolerance"),
    [
        ("0-fp32", 3, 1e-6),
        ("1-fp32", 2, 1e-6),
        ("1-elastic", 1, 1e-6),
        ("2-fp32", 0, 1e-6),
        ("3-fp32", 1, 1e-6),
        ("2-bf16", 3, 1e-3),
        ("2-fp16", 2, 2e-4),
    ],
)
def test_training_continues_as_deepspeed_continues_it(runs: Path, name: str, stage: int, tolerance: float) -> None:
    """From what DeepSpeed saved itself where our stage is odd, else from what was imported."""
    expected = torch.load(runs / name / "memory.pt")
    folder = runs / name / ("saved" if stage % 2 else "imported")
    of_ranks = run_on_ranks(NUM_RANKS, _continued, str(folder), name, stage)
    first = of_ranks[0]
    assert first["path"] == str(folder / TAG)
    assert first["epoch"] == 4
    counters = [expected[key] for key in ("global_steps", "global_samples", "micro_steps", "skipped_steps")]
    assert list(first["counters"]) == counters
    assert first["rates"] == expected["lrs"]
    losses = [sum(each) / NUM_RANKS for each in zip(*(of_rank["losses"] for of_rank in of_ranks), strict=True)]
    assert losses == pytest.approx(expected["losses"], rel=tolerance)


def test_a_damaged_file_is_not_imported(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "2-fp32" / "saved", tmp_path / "saved")
    path = next((tmp_path / "saved").glob("*/zero_pp_rank_1_*"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{path.name}: .*data/\d+ has another checksum"):
        import_deepspeed(tmp_path / "saved", tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_the_command_imports_a_tag_once(runs: Path, tmp_path: Path) -> None:
    arguments = [str(runs / "3-fp32" / "saved"), str(tmp_path / "target"), "--tag", TAG]
    result = subprocess.run([sys.executable, "-m", "launcher.checkpoint", "import", *arguments], capture_output=True)
    assert result.stdout.decode().strip() == f"{tmp_path / 'target' / TAG}: imported", result.stderr
    assert (tmp_path / "target" / "latest").read_text().strip() == TAG
    with pytest.raises(CheckpointError, match=rf"{TAG} is there already: a checkpoint of ours"):
        run(arguments)
