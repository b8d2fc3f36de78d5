"""From an engine config to a setting and back, and what this release says to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.base.errors import ConfigError
from launcher.config.load import load_config
from launcher.planner.memory import Offload, Precision, Setting, rank_memory
from launcher.planner.model import ModelFacts, Parameter
from launcher.planner.settings import as_config, from_config, ladder, micro_batch_of, refusals, resolve

BASE = Setting(0, Precision.of("bf16"))


def setting_of(config: dict[str, Any], world_size: int = 4) -> tuple[Setting, int | None]:
    loaded = load_config(config, world_size=world_size, for_planning=True)
    resolved = resolve(loaded.config, world_size, 1024)
    return from_config(resolved), micro_batch_of(resolved, world_size)


@pytest.mark.parametrize("setting", ladder(BASE), ids=lambda setting: f"{setting.stage}, {setting.offload}")
def test_a_setting_as_config_is_the_setting(setting: Setting) -> None:
    found, batch = setting_of({"train_micro_batch_size_per_gpu": 3, **as_config(setting)})
    assert (found, batch) == (setting, 3)


def test_what_an_engine_refuses_is_a_notice_for_the_planner_only() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"legacy_stage1": True}}
    with pytest.raises(ConfigError, match="legacy_stage1 true is not supported"):
        load_config(config)
    (notice,) = load_config(config, for_planning=True).notices
    assert "legacy_stage1 true is not supported" in notice.message
    with pytest.raises(ConfigError, match="unknown key"):
        load_config(config | {"zero": {}}, for_planning=True)
    assert refusals(BASE) == []


def test_every_key_that_counts_is_read() -> None:
    config = {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True, "bf16_optimizer_states": True, "bf16_master_weights_and_grads": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "optimizer": {"type": "Lion", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 11,
            "sub_group_size": 12,
            "overlap_comm": False,
            "stage3_param_persistence_threshold": 13,
            "stage3_prefetch_bucket_size": 18,
            "stage3_max_live_parameters": 20,
            "stage3_max_reuse_distance": 19,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/disk", "buffer_count": 14, "ratio": 0.5},
            "offload_param": {
                "device": "nvme",
                "nvme_path": "/disk",
                "buffer_count": 15,
                "buffer_size": 16,
                "max_in_cpu": 17,
            },
        },
    }
    found, batch = setting_of(config)
    assert batch == 4
    assert found.precision == Precision("bf16", 2, 0, 2, 2)
    assert found.offload == Offload("nvme", "nvme", 0.5, 14, 15, 16, 17, 12)
    assert (found.max_unit_numel, found.persistent_numel, found.overlaps) == (11, 13, False)
    assert (found.prefetch_numel, found.kept_numel) == (18, 19)


@pytest.mark.parametrize(
    ("precisions", "expected"),
    [
        ({"fp16": {"enabled": "auto"}}, "fp16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}, "bf16"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": "auto"}}, "fp16"),
        ({}, "fp32"),
    ],
)
def test_a_config_full_of_auto(precisions: dict[str, Any], expected: str) -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        **precisions,
    }
    found, batch = setting_of(config)
    assert (found.precision.name, found.max_unit_numel, batch) == (expected, 1024**2, 1)


def test_muon_keeps_one_state_of_a_matrix_and_two_of_the_rest() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Muon"}}
    names = {"embed_tokens.weight": 10, "layers.0.mlp.up.weight": 20, "layers.0.norm.weight": 2, "lm_head.weight": 8}
    model = ModelFacts("a model", "a test", tuple(Parameter(name, numel) for name, numel in names.items()))
    found = rank_memory(model, replace(setting_of(config)[0], stage=0), 1)
    assert found.optimizer == 4 * (20 + 2 * (10 + 2 + 8))


@pytest.mark.parametrize(("params", "num_states"), [({}, 0), ({"momentum": 0.9}, 1)])
def test_sgd_keeps_a_state_with_momentum_only(params: dict[str, Any], num_states: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": params}}
    assert setting_of(config)[0].precision.state_bytes == 4 * num_states
