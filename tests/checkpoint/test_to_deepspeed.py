"""Checkpoints written for DeepSpeed: their files have what was saved here, at any stage and number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.launch.command import run_here
from harness.train import deepspeed_experts
from harness.train.deepspeed_runs import (
    ACCUMULATION,
    CLIENT_STATE,
    NUM_STEPS,
    batch_of,
    build_model,
    config_of,
    parameter_groups,
)
from harness.train.ranks import run_on_ranks
from torch import Tensor

import launcher
from launcher.base.errors import CheckpointError
from launcher.checkpoint.convert.to_deepspeed import export_deepspeed
from launcher.checkpoint.formats.deepspeed import open_deepspeed
from launcher.checkpoint.formats.native import NativeSource
from launcher.checkpoint.formats.source import CheckpointSource
from launcher.checkpoint.formats.torch_file import open_torch_file
from launcher.moe import MoE

TAG = f"global_step{NUM_STEPS}"
# Name -> stage, precision, options of the config.
SAVED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "fp32": (2, "fp32", {}),
    "bf16": (3, "bf16", {"zero": {"sub_group_size": 100, "stage3_param_persistence_threshold": 0}}),
    "fp16": (1, "fp16", {"zero": {"round_robin_gradients": True, "parameter_alignment": True}}),
}


def save(rank: int, world_size: int, folder: str) -> None:
    """Train and save, once for each of `SAVED`."""
    for name, (stage, precision, options) in SAVED.items():
        model = build_model()
        zero = {key: value for key, value in options.get("zero", {}).items() if key != "parameter_alignment"}
        config = config_of(stage, precision, {**options, "zero": zero})
        engine, *_ = launcher.initialize(model=model, model_parameters=parameter_groups(model), config=config)
        for micro_step in range(NUM_STEPS * ACCUMULATION):
            engine.backward(engine(*batch_of(rank, micro_step)))
            engine.step()
        engine.save_checkpoint(f"{folder}/{name}", client_state={**CLIENT_STATE, "table": torch.arange(5) * 0.5})
        engine.destroy()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_on_ranks(2, save, str(folder))
    return folder


def values_of(source: CheckpointSource, key: str, name: str) -> Tensor:
    out = torch.empty(source.params[name].numel)
    source.read(key, name, 0, out)
    return out


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", SAVED)
def test_what_is_written_is_what_was_saved(saved: Path, tmp_path: Path, name: str, stage: int, num_ranks: int) -> None:
    path = export_deepspeed(saved / name, tmp_path, stage=stage, num_ranks=num_ranks)
    assert path == tmp_path / TAG
    assert (tmp_path / "latest").read_text() == TAG
    prefix = "bf16_" if name == "bf16" else ""
    states = {f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(num_ranks)}
    models = {f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(num_ranks)}
    expected = (models if stage == 3 else {"mp_rank_00_model_states.pt"}) | (states if stage else set())
    assert {each.name for each in path.iterdir()} == expected
    ours, theirs = NativeSource(saved / name / TAG), open_deepspeed(tmp_path)
    assert theirs.params.keys() == ours.params.keys()
    for key, stored in ours.params.items():
        found = theirs.params[key]
        assert (found.shape, found.dtype, found.group, found.states) == (
            stored.shape, stored.dtype, stored.group, stored.states
        )  # fmt: skip
        assert found.is_trainable == stored.is_trainable
        for state in ("weight", *stored.states):
            assert values_of(theirs, state, key).equal(values_of(ours, state, key)), (key, state)
        assert all(torch.as_tensor(found.scalars[each]) == value for each, value in stored.scalars.items())
    _assert_same_run(ours, theirs, has_hysteresis=stage > 0)
    assert theirs.tied == {"head.weight": "embed.weight"}


def _assert_same_run(ours: CheckpointSource, theirs: CheckpointSource, *, has_hysteresis: bool) -> None:
    expected, found = ours.state, theirs.state
    for field in ("global_steps", "global_samples", "micro_steps", "skipped_steps", "optimizer", "lr_scheduler"):
        assert getattr(found, field) == getattr(expected, field), field
    assert [group["lr"] for group in found.groups] == [group["lr"] for group in expected.groups]
    assert [group["weight_decay"] for group in found.groups] == [0.1, 0.0]
    client = dict(found.client_state)
    assert client.pop("table").equal(expected.client_state["table"])
    assert client == CLIENT_STATE
    assert found.buffers.keys() == expected.buffers.keys()
    assert all(found.buffers[each].equal(values) for each, values in expected.buffers.items())
    scale, expected_scale = found.loss_scaler, expected.loss_scaler
    assert (scale is None) == (expected_scale is None)
    if scale is not None and expected_scale is not None:
        kept = scale.keys() - ({"hysteresis"} if not has_hysteresis else set())
        assert {key: scale[key] for key in kept} == {key: expected_scale[key] for key in kept}


def test_a_tag_is_not_written_twice(saved: Path, tmp_path: Path) -> None:
    export_deepspeed(saved / "fp32", tmp_path)
    assert len(list((tmp_path / TAG).glob("zero_pp_rank_*"))) == 2  # as many as saved it
    with pytest.raises(CheckpointError, match=rf"{TAG} is there already; choose another folder"):
        export_deepspeed(saved / "fp32" / TAG, tmp_path)


def test_a_checkpoint_of_deepspeed_moves_to_another_stage(saved: Path, tmp_path: Path) -> None:
    export_deepspeed(saved / "bf16", tmp_path / "first", stage=2, num_ranks=3)
    path = export_deepspeed(tmp_path / "first", tmp_path / "second", stage=3)
    assert len(list(path.glob("bf16_zero_pp_rank_*_optim_states.pt"))) == 3
    ours, theirs = NativeSource(saved / "bf16" / TAG), open_deepspeed(path)
    for name, stored in ours.params.items():
        for key in ("weight", *stored.states):
            assert values_of(theirs, key, name).equal(values_of(ours, key, name)), (key, name)
    assert theirs.tied == {"head.weight": "embed.weight"}


def test_what_cannot_be_written_leaves_nothing(saved: Path, tmp_path: Path) -> None:
    path = next((saved / "fp32" / TAG).glob("rank-00001*.safetensors"))
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    try:
        with pytest.raises(CheckpointError, match="it was cut off"):
            export_deepspeed(saved / "fp32", tmp_path)
    finally:
        path.write_bytes(content)
    assert list(tmp_path.iterdir()) == []


def test_the_command_exports(saved: Path, tmp_path: Path) -> None:
    options = ("--format", "deepspeed", "--ranks", "4", "--stage", "3")
    result = run_here(tmp_path, "checkpoint", "export", saved / "fp32", tmp_path / "out", *options)
    assert (result.code, result.out) == (0, f"{tmp_path / 'out' / TAG}: written for DeepSpeed\n"), result.err
    source = open_deepspeed(tmp_path / "out")
    assert source.state.global_steps == NUM_STEPS


def test_universal_files_have_each_tensor_by_name(saved: Path, tmp_path: Path) -> None:
    path = export_deepspeed(saved / "bf16", tmp_path, is_universal=True)
    assert (tmp_path / "latest_universal").read_text() == TAG
    ours = NativeSource(saved / "bf16" / TAG)
    trained = {name: stored for name, stored in ours.params.items() if stored.is_trainable}
    assert {each.name for each in (path / "zero").iterdir()} == {*trained, "optimizer_state.pt"}
    for name, stored in trained.items():
        for key, file in {"weight": "fp32", **{state: state for state in stored.states}}.items():
            found = torch.load(path / "zero" / name / f"{file}.pt")["param"]
            assert found.shape == stored.shape
            assert found.view(-1).equal(values_of(ours, key, name))
        assert torch.load(path / "zero" / name / "step.pt") == NUM_STEPS


def test_options_of_the_command(tmp_path: Path) -> None:
    result = run_here(tmp_path, "checkpoint", "export", "a", "b", "--format", "universal", "--ranks", "2")
    assert result.code == 2
    assert result.err.startswith("✗ --ranks goes with --format deepspeed")


def save_experts(rank: int, world_size: int, folder: str) -> None:
    model, config = deepspeed_experts.build(MoE), deepspeed_experts.config_of(2)
    engine, *_ = launcher.initialize(model=model, model_parameters=model.parameters(), config=config)
    deepspeed_experts.trained(engine, rank, range(1))
    engine.save_checkpoint(folder)
    engine.destroy()


def test_experts_are_named_by_their_number_on_the_rank(tmp_path: Path) -> None:
    run_on_ranks(2, save_experts, str(tmp_path / "saved"))
    path = export_deepspeed(tmp_path / "saved", tmp_path / "out", num_ranks=4)
    ours = NativeSource(tmp_path / "saved" / "global_step1")
    model = torch.load(path / "mp_rank_00_model_states.pt")
    assert model["num_experts"] == [deepspeed_experts.EXPERTS] * 2
    assert not [name for name in model["module"] if "experts." in name]
    plain, spread = model["param_shapes"]
    assert [name for name in plain if "experts." in name] == []
    begin = [f"layers.{layer}.deepspeed_moe.experts.deepspeed_experts." for layer in range(2)]
    local = [f"{layer}{number}.{kind}" for layer in begin for number in range(2) for kind in ("weight", "bias")]
    assert list(spread) == local
    parts = []
    for number in range(deepspeed_experts.EXPERTS):
        expert = torch.load(path / f"layer_1_expert_{number}_mp_rank_00_model_states.pt")
        assert list(expert) == [f"{begin[1]}{number}.{kind}" for kind in ("weight", "bias")]
        assert all(values.view(-1).equal(values_of(ours, "weight", name)) for name, values in expert.items())
        state = open_torch_file(path / f"zero_pp_rank_{number}_mp_rank_00_optim_states.pt")
        parts.append(state["optimizer_state_dict"]["single_partition_of_fp32_groups"][1])
    # Ranks 1 and 3 have the experts 2 and 3 of each layer, half of their optimizer each.
    names = [f"{layer}{number}.{kind}" for layer in begin for number in (2, 3) for kind in ("weight", "bias")]
    assert torch.cat([parts[1], parts[3]]).equal(torch.cat([values_of(ours, "weight", name) for name in names]))
    for options, message in (
        ({"stage": 3}, "DeepSpeed has no experts at stage 3"),
        ({"num_ranks": 3}, "experts over 2 ranks"),
        ({"is_universal": True}, "no experts"),
    ):
        with pytest.raises(CheckpointError, match=message):
            export_deepspeed(tmp_path / "saved", tmp_path / "refused", **options)
