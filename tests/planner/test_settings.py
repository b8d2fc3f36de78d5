"""From an engine config to a setting and back, and what this release says to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.base.errors import ConfigError
from launcher.config.load import load_config
from launcher.config.policies import DType, OffloadPolicy, Place, Precision, zero_policy
from launcher.config.schema import Config
from launcher.planner.memory import Setting, States, rank_memory
from launcher.planner.model import ModelFacts, Parameter
from launcher.planner.settings import (
    as_config,
    in_precision,
    ladder,
    micro_batch_of,
    refusals,
    resolve,
    setting_of,
)

BASE = in_precision(Config(), "bf16")
WORLD_SIZE = 4


def planned(config: dict[str, Any], world_size: int = WORLD_SIZE) -> tuple[Setting, int | None]:
    loaded = load_config(config, world_size=world_size, for_planning=True)
    resolved = resolve(loaded.config, world_size, 1024)
    return setting_of(resolved, world_size), micro_batch_of(resolved, world_size)


@pytest.mark.parametrize("setting", ladder(BASE, WORLD_SIZE), ids=lambda one: f"{one.stage}, {one.offload_label}")
def test_a_setting_as_config_is_the_setting(setting: Setting) -> None:
    found, batch = planned({"train_micro_batch_size_per_gpu": 3, **as_config(setting)})
    assert (found, batch) == (setting, 3)


def test_ranks_of_one_sequence_are_part_of_a_setting() -> None:
    setting, batch = planned({"train_batch_size": 6, "sequence_parallel_size": 2, "zero_optimization": {"stage": 2}})
    assert (setting.sizes.data, setting.sizes.sequence, batch) == (2, 2, 3)
    assert planned({"train_micro_batch_size_per_gpu": 1, **as_config(setting)})[0] == setting


def test_what_an_engine_refuses_is_a_notice_for_the_planner_only() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"legacy_stage1": True}}
    with pytest.raises(ConfigError, match="legacy_stage1 true is not supported"):
        load_config(config)
    (notice,) = load_config(config, for_planning=True).notices
    assert "legacy_stage1 true is not supported" in notice.message
    with pytest.raises(ConfigError, match="unknown key"):
        load_config(config | {"zero": {}}, for_planning=True)
    assert refusals(setting_of(BASE, WORLD_SIZE)) == []


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
            "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 14, "ratio": 0.5},
            "offload_param": {
                "device": "nvme",
                "nvme_path": "/nvme",
                "buffer_count": 15,
                "buffer_size": 16,
                "max_in_cpu": 17,
            },
        },
    }
    found, batch = planned(config)
    assert batch == 4
    policy = found.policy
    assert (found.stage, found.states) == (3, States(1))
    assert policy.precision == Precision(DType.BF16, False, DType.BF16, has_16bit_states=True)
    offload = OffloadPolicy(Place.DISK, Place.DISK, 0.5, max_host_params=17, num_steps_in_order=40)
    assert policy.offload == offload
    # At stage 3 what one rank may own of a unit bounds it, and small buckets do not.
    assert (policy.max_unit_numel, policy.overlap_comm) == (12 * 4, False)
    kept = policy.parameters
    assert (kept.persistence_threshold, kept.prefetch_numel, kept.num_read_ahead) == (13, 0, 14)
    assert (kept.max_live_numel, kept.max_reuse_distance) == (20, 19)


def test_the_planner_counts_what_the_engine_is_built_with() -> None:
    data = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "sub_group_size": 1000}}
    for world_size in (1, 4):
        config = load_config(data).config
        assert setting_of(config, world_size).policy == zero_policy(config, world_size)
        assert zero_policy(config, world_size).max_unit_numel == 1000 * world_size


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
    found, batch = planned(config)
    assert (found.policy.precision.param.value, found.policy.max_unit_numel, batch) == (expected, 1024**2, 1)


def test_muon_keeps_one_state_of_a_matrix_and_two_of_the_rest() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Muon"}}
    names = {"embed_tokens.weight": 10, "layers.0.mlp.up.weight": 20, "layers.0.norm.weight": 2, "lm_head.weight": 8}
    model = ModelFacts("a model", "a test", tuple(Parameter(name, numel) for name, numel in names.items()))
    found = rank_memory(model, replace(planned(config)[0], stage=0), 1)
    assert found.optimizer == 4 * (20 + 2 * (10 + 2 + 8))


@pytest.mark.parametrize(("params", "num_states"), [({}, 0), ({"momentum": 0.9}, 1)])
def test_sgd_keeps_a_state_with_momentum_only(params: dict[str, Any], num_states: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": params}}
    assert planned(config)[0].states.num_of_element == num_states


@pytest.mark.parametrize("trains", [True, False])
def test_parameters_of_a_config_stay_on_the_device_below_stage_3(trains: bool) -> None:
    def offload_of(zero: dict[str, Any]) -> Any:
        config = load_config({"zero_optimization": zero}).config
        return setting_of(config, 2, trains=trains).policy.offload

    assert offload_of({"stage": 2, "offload_param": {"device": "cpu"}}) == offload_of({"stage": 2})
