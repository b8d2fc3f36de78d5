"""Checkpoints of the real DeepSpeed are read to the bit: parameters, states, counters, client state."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import deepspeed
from harness.deepspeed_runs import ACCUMULATION, CLIENT_STATE, LR, NUM_RANKS, NUM_STEPS, RUNS, build_model
from torch import Tensor

from launcher.base.errors import CheckpointError
from launcher.checkpoint.deepspeed import open_deepspeed
from launcher.checkpoint.source import CheckpointSource


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All of `RUNS`, by the real DeepSpeed on real ranks."""
    folder = tmp_path_factory.mktemp("deepspeed")
    deepspeed.run_ranks(NUM_RANKS, "harness.deepspeed_runs", str(folder))
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
    (tmp_path / name / f"global_step{NUM_STEPS}" / lost).unlink()
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
