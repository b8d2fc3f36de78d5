"""Configs as they are written for DeepSpeed: what has no effect is said at start, and means nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from harness.needs import need
from harness.train.deepspeed import PEERS, available

from launcher.base.errors import ConfigError
from launcher.config.load import LoadedConfig, load_config
from launcher.config.policies import Place, offload_policy, zero_policy
from launcher.config.schema import DEFAULT_LEAF_CLASSES
from launcher.config.schema_params import TORCHS_WEIGHT_DECAY


def said(loaded: LoadedConfig) -> list[str]:
    return [notice.message for notice in loaded.notices]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("place", [{"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme"}, {"device": "nvme"}])
def test_parameters_stay_on_the_device_below_stage_3(stage: int, place: dict[str, Any]) -> None:
    loaded = load_config({"zero_optimization": {"stage": stage, "offload_param": place}})
    (sentence,) = said(loaded)
    device = place["device"]
    assert sentence == f'offload_param "{device}" has no effect: at stage {stage} every rank keeps whole parameters'
    assert offload_policy(loaded.config).params is Place.DEVICE
    plain = load_config({"zero_optimization": {"stage": stage}}).config
    assert zero_policy(loaded.config, 2).max_unit_numel == zero_policy(plain, 2).max_unit_numel


@pytest.mark.parametrize(
    "more",
    [
        {"device": "nvme", "nvme_path": "/nvme"},
        {"device": "cpu", "delayed_update": True},
        {"device": "cpu", "super_offload": True},
    ],
)
def test_torchs_adam_gives_way_where_states_are_updated_in_parts(more: dict[str, Any]) -> None:
    adam = {"type": "AdamW", "params": {"torch_adam": True}}
    (sentence,) = said(load_config({"zero_optimization": {"stage": 3, "offload_optimizer": more}, "optimizer": adam}))
    assert sentence.startswith("torch_adam true has no effect: states on disk")
    on_host = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    assert said(load_config({"zero_optimization": on_host, "optimizer": adam})) == []


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"type": "AdamW", "params": {"torch_adam": True}}, TORCHS_WEIGHT_DECAY),
        ({"type": "adam", "params": {"torch_adam": True}}, 0.01),
        ({"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}, 0.0),
        ({"type": "AdamW", "params": {"torch_adam": True, "weight_decay": 0.0}}, 0.0),
        ({"type": "AdamW", "params": {}}, 0.0),
    ],
)
def test_torchs_adamw_has_torchs_weight_decay(section: dict[str, Any], expected: float) -> None:
    optimizer = load_config({"optimizer": section}).config.optimizer
    assert optimizer is not None
    assert optimizer.params["weight_decay"] == expected


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"disable_python_gc": True}, "disable_python_gc true has no effect"),
        ({"data_types": {"keep_in_fp32_modules": ["bias"]}}, "data_types.keep_in_fp32_modules"),
        (
            {"tensor_parallel": {"autotp_size": 1, "vocab_parallel_lm_head": True}},
            "tensor_parallel.vocab_parallel_lm_head true",
        ),
        ({"compile": {"autoep_non_moe": True}}, "compile.autoep_non_moe true has no effect"),
        ({"zero_optimization": {"stage": 1, "allgather_bucket_size": 0}}, "zero_optimization.allgather_bucket_size 0"),
        *(
            ({"optimizer": {"type": kind, "params": {"fp32_optimizer_states": False}}}, "optimizer.params.fp32_")
            for kind in ("Adam", "Lion", "Adagrad", "Muon")
        ),
        *(
            ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True, **more}}}, "optimizer.params.")
            for more in ({"foreach": True}, {"fused": True}, {"capturable": True})
        ),
    ],
)
def test_keys_of_deepspeed_that_do_nothing_here_are_said(data: dict[str, Any], sentence: str) -> None:
    (found,) = said(load_config(data))
    assert found.startswith(sentence)


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        ({"tensor_parallel": {"autotp_size": 1, "vocab_parallel_ce_backend": "liger"}}, "the model's own loss"),
        ({"optimizer": {"type": "AdamW", "params": {"differentiable": True}}}, "remove the key"),
        ({"optimizer": {"type": "Adagrad", "params": {"amsgrad": True}}}, "remove the key"),
    ],
)
def test_keys_of_deepspeed_that_cannot_be_honoured_say_what_to_do(data: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        load_config(data)


def test_zero_is_a_size_where_it_is_one_for_deepspeed() -> None:
    zero = {"stage": 3, "sub_group_size": 0, "zero_hpz_partition_size": 0}
    on_disk = {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 0}
    loaded = load_config({"zero_optimization": {**zero, "offload_param": on_disk, "offload_optimizer": on_disk}})
    policy = zero_policy(loaded.config, 2)
    assert (policy.max_unit_numel, policy.mesh.node_size, policy.parameters.num_read_ahead) == (1, None, 0)


def test_numbers_are_booleans() -> None:
    config = load_config(
        {
            "zero_allow_untested_optimizer": 1,
            "bf16": {"enabled": 1},
            "fp16": {"enabled": 0},
            "zero_optimization": {"stage": 2, "overlap_comm": 0, "cpu_offload": 1, "contiguous_gradients": 1},
        }
    ).config
    assert config.zero_allow_untested_optimizer is config.bf16.enabled is True
    assert config.fp16.enabled is config.zero_optimization.overlap_comm is False
    assert config.zero_optimization.offload_optimizer.device == "cpu"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"flops_profiler": {"enabled": True, "step": 5}}, "flops_profiler.step 5 has no effect"),
        ({"pipeline": {"use_reentrant": False}}, "pipeline.use_reentrant false has no effect"),
        ({"optimizer": {"type": "Adam", "torch_adam": True}}, "optimizer.torch_adam true has no effect"),
    ],
)
def test_keys_that_deepspeed_reads_elsewhere_are_said(data: dict[str, Any], sentence: str) -> None:
    (found,) = said(load_config(data))
    assert found.startswith(sentence)


def test_one_leaf_is_a_list_of_one() -> None:
    leaves = load_config({"zero_optimization": {"stage": 3, "leaf_module": {"classes": "Block"}}}).config
    assert leaves.zero_optimization.leaf_module.classes == ["Block"]
    plain = load_config({"zero_optimization": {"stage": 3}})
    assert plain.config.zero_optimization.leaf_module.classes == list(DEFAULT_LEAF_CLASSES)
    assert plain.notices == ()


HJSON = """
  # a comment
  train_batch_size: 8
  optimizer: {
    type: AdamW
    params: {lr: 0.001, betas: [0.9, 0.95]}
  }
  bf16: {enabled: true}
"""


@pytest.fixture
def hjson(monkeypatch: pytest.MonkeyPatch) -> None:
    need(available())
    monkeypatch.syspath_prepend(str(PEERS))
    monkeypatch.setitem(sys.modules, "hjson", None)  # to be forgotten after the test
    del sys.modules["hjson"]


@pytest.mark.usefixtures("hjson")
@pytest.mark.parametrize("text", [HJSON, f"{{{HJSON}}}"])
def test_hjson_is_read_as_deepspeed_reads_it(tmp_path: Path, text: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    config = load_config(tmp_path / "ds.json").config
    assert config.train_batch_size == 8
    assert config.optimizer is not None
    assert config.optimizer.params["betas"] == [0.9, 0.95]
    assert config.bf16.enabled is True


@pytest.mark.usefixtures("hjson")
def test_what_is_wrong_in_hjson_is_said_by_its_key(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text("{train_batch_siz: 8}")
    with pytest.raises(ConfigError, match='unknown key "train_batch_siz"; did you mean "train_batch_size"'):
        load_config(file)
    file.write_text("{bf16: {}, bf16: {}}")
    with pytest.raises(ConfigError, match='duplicate key "bf16"'):
        load_config(file)


@pytest.mark.usefixtures("hjson")
def test_mistakes_in_json_keep_their_places() -> None:
    with pytest.raises(ConfigError, match="config:1:10: "):
        load_config('{"bf16": }')


def test_hjson_without_its_package_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    (tmp_path / "ds.json").write_text(f"{{{HJSON}}}")
    with pytest.raises(ConfigError, match="pip install hjson") as caught:
        load_config(tmp_path / "ds.json")
    assert len(caught.value.diagnostics) == 1
