"""Checkpoints that are none of DeepSpeed's, or of a kind that is not read, are refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.base.errors import CheckpointError
from launcher.checkpoint.formats.deepspeed import open_deepspeed
from launcher.checkpoint.formats.deepspeed.files import holds_deepspeed

MODEL = "mp_rank_00_model_states.pt"


def model_states(**changes: Any) -> dict[str, Any]:
    return {
        "module": {"weight": torch.ones(3), "bias": torch.ones(3), "other": torch.ones(3)},
        "buffer_names": [],
        "optimizer": None,
        "global_steps": 1,
        "skipped_steps": 0,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
        **changes,
    }


def saved(folder: Path, **files: Any) -> Path:
    (folder / "tag").mkdir()
    (folder / "latest").write_text("tag")
    for name, content in files.items():
        torch.save(content, folder / "tag" / f"{name}.pt")
    return folder


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mp_rank_01_model_states", "tensor parallelism"),
        ("layer_03-model_00-model_states", "pipeline parallelism"),
        ("layer_0_expert_3_mp_rank_00_model_states", "experts"),
        ("expp_rank_0_mp_rank_00_optim_states", "experts"),
        ("zero_pp_rank_0_mp_rank_01_optim_states", "tensor parallelism"),
    ],
)
def test_kinds_that_are_not_read(tmp_path: Path, name: str, said: str) -> None:
    folder = saved(tmp_path, **{"mp_rank_00_model_states": model_states(), name: {}})
    with pytest.raises(CheckpointError, match=rf"tag: DeepSpeed's checkpoints of {said}.* are not read; "):
        open_deepspeed(folder)


def test_states_offloaded_to_nvme_are_not_read(tmp_path: Path) -> None:
    folder = saved(tmp_path, mp_rank_00_model_states=model_states())
    (folder / "tag" / "offloaded_tensors").mkdir()
    with pytest.raises(CheckpointError, match=r"offloaded to NVMe \(here offloaded_tensors\) are not read; load "):
        open_deepspeed(folder)


def test_several_sizes_of_tensor_parallelism_in_one_file(tmp_path: Path) -> None:
    folder = saved(tmp_path, mp_rank_00_model_states=model_states(mp_world_size=2))
    with pytest.raises(CheckpointError, match=r"tensor parallelism are not read"):
        open_deepspeed(folder)


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no file `latest`"):
        open_deepspeed(tmp_path)
    with pytest.raises(CheckpointError, match=r"no file `latest`"):
        open_deepspeed(tmp_path / "nowhere")
    saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"tag: there is no file of DeepSpeed's"):
        open_deepspeed(tmp_path)
    assert not holds_deepspeed(tmp_path / "tag")
    with pytest.raises(CheckpointError, match=r"no tag 'other'"):
        open_deepspeed(tmp_path, "other")
    with pytest.raises(CheckpointError, match=r"no tag '\.\./x'"):
        open_deepspeed(tmp_path, "../x")
    (tmp_path / "tag" / "zero").mkdir()
    with pytest.raises(CheckpointError, match=r"universal checkpoints are not read"):
        open_deepspeed(tmp_path)


def test_without_latest_the_tags_are_listed(tmp_path: Path) -> None:
    folder = saved(tmp_path, mp_rank_00_model_states=model_states())
    (folder / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"name one of tag$"):
        open_deepspeed(folder)
    assert list(open_deepspeed(folder, "tag").params) == ["weight", "bias", "other"]


@pytest.mark.parametrize("content", [{"a": 1}, [1], {"module": {}, "ds_version": "1"}])
def test_a_file_of_torch_save_that_is_not_deepspeeds(tmp_path: Path, content: Any) -> None:
    folder = saved(tmp_path, mp_rank_00_model_states=content)
    with pytest.raises(CheckpointError, match=rf"{MODEL}: the file is none of DeepSpeed's checkpoints: it has no "):
        open_deepspeed(folder)


def test_a_checkpoint_that_contradicts_itself(tmp_path: Path) -> None:
    shapes = [{"weight": torch.Size([3]), "bias": torch.Size([3])}]
    zero = {
        "zero_stage": 2,
        "partition_count": [1],
        "single_partition_of_fp32_groups": [torch.ones(5)],
        "base_optimizer_state": {"state": {}, "param_groups": [{"params": [0], "lr": 1.0}]},
    }
    folder = saved(
        tmp_path,
        mp_rank_00_model_states=model_states(param_shapes=shapes),
        zero_pp_rank_0_mp_rank_00_optim_states={"optimizer_state_dict": zero},
    )
    with pytest.raises(CheckpointError, match=r"fp32 weights of group 0 are fewer than its parameters"):
        open_deepspeed(folder)


def _plain_optimizer(*groups: list[int], **states: Any) -> dict[str, Any]:
    state = {int(number.removeprefix("_")): value for number, value in states.items()}
    return {"state": state, "param_groups": [{"params": group, "lr": 0.1} for group in groups]}


def _adam(value: float, numel: int = 3) -> dict[str, Any]:
    return {"step": torch.tensor(2.0), "exp_avg": torch.full((numel,), value), "exp_avg_sq": torch.ones(numel)}


def test_stage_0_states_of_one_group_are_matched_in_order(tmp_path: Path) -> None:
    optimizer = _plain_optimizer([0, 1, 2], _0=_adam(1.0), _1=_adam(2.0), _2=_adam(3.0))
    source = open_deepspeed(saved(tmp_path, mp_rank_00_model_states=model_states(optimizer=optimizer)))
    out = torch.empty(2)
    for name, value in {"weight": 1.0, "bias": 2.0, "other": 3.0}.items():
        source.read("exp_avg", name, 1, out)
        assert out.tolist() == [value, value]


def test_stage_0_states_that_could_be_of_several_parameters_are_refused(tmp_path: Path) -> None:
    two_groups = _plain_optimizer([0, 1], [2], _0=_adam(1.0), _1=_adam(2.0), _2=_adam(3.0))
    one_frozen = _plain_optimizer([0, 1], _0=_adam(1.0), _1=_adam(2.0))
    none_fits = _plain_optimizer([0, 1, 2], _0=_adam(1.0), _1=_adam(2.0, numel=4), _2=_adam(3.0))
    for index, (optimizer, said) in enumerate(
        [(two_groups, "more than one way"), (one_frozen, "more than one way"), (none_fits, "no parameters")]
    ):
        (tmp_path / str(index)).mkdir()
        folder = saved(tmp_path / str(index), mp_rank_00_model_states=model_states(optimizer=optimizer))
        with pytest.raises(CheckpointError, match=rf"without names, and they fit .*{said}.*; save it at stage 1"):
            open_deepspeed(folder)


def test_stage_0_fused_masters_are_found_by_their_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    masters = [torch.randn(3) for _ in range(3)]
    module = {name: each.bfloat16() for name, each in zip(("weight", "bias", "other"), masters, strict=True)}
    flats = [torch.cat([masters[0], masters[2]]), masters[1]]  # two groups that interleave
    moments = [torch.arange(6.0), torch.arange(6.0, 9.0)]
    inner = _plain_optimizer(
        [0], [1], **{f"_{i}": {"step": 2, "exp_avg": each, "exp_avg_sq": each} for i, each in enumerate(moments)}
    )
    optimizer = {"optimizer_state_dict": inner, "fp32_groups_flat": flats, "clip_grad": 0.0}
    states = model_states(module=module, optimizer=optimizer)
    source = open_deepspeed(saved(tmp_path, mp_rank_00_model_states=states))
    out = torch.empty(3)
    expected = {
        "weight": (masters[0], [0.0, 1, 2]),
        "bias": (masters[1], [6.0, 7, 8]),
        "other": (masters[2], [3.0, 4, 5]),
    }
    for name, (master, moment) in expected.items():
        source.read("weight", name, 0, out)
        assert out.equal(master)
        source.read("exp_avg", name, 0, out)
        assert out.tolist() == moment
        assert float(source.params[name].scalars["step"]) == 2
