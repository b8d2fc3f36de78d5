"""Configs as objects: what scripts and libraries read of them, by DeepSpeed's names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, ValidationError

from launcher.base.errors import ConfigError
from launcher.compat.configs import (
    DeepSpeedConfig,
    DeepSpeedConfigModel,
    DeepSpeedFP16Config,
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    ZeroStageEnum,
    get_bfloat16_config,
)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"stage3_prefetch_bucket_size": 5}, "prefetch_bucket_size", 5),
        ({"prefetch_bucket_size": 5}, "prefetch_bucket_size", 5),
        ({"stage3_max_live_parameters": 1e9}, "max_live_parameters", 1_000_000_000),
        ({"stage3_gather_fp16_weights_on_model_save": True}, "gather_16bit_weights_on_model_save", True),
        ({"stage": 2}, "overlap_comm", False),
        ({"stage": 3}, "overlap_comm", True),
        ({"stage": 3, "overlap_comm": False}, "overlap_comm", False),
        ({"stage": "auto"}, "stage", ZeroStageEnum.disabled),
        ({}, "offload_param", None),
        ({"offload_param": None}, "offload_param", None),
        ({}, "reduce_bucket_size", 500_000_000),
        ({}, "param_persistence_threshold", 100_000),
    ],
)
def test_fields_of_zero(given: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(DeepSpeedZeroConfig(**given), name) == value


def test_offload_of_zero() -> None:
    old = DeepSpeedZeroConfig(cpu_offload=True, cpu_offload_param=True)
    assert isinstance(old.offload_param, DeepSpeedZeroOffloadParamConfig)
    assert isinstance(old.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    assert old.offload_optimizer.device == old.offload_param.device == "cpu"
    assert DeepSpeedZeroConfig(offload_param={}).offload_param.device == "none"
    assert [DeepSpeedZeroOffloadOptimizerConfig(pipeline_write=on).pipeline for on in (False, True)] == [False, True]
    assert (
        DeepSpeedZeroConfig(stage=2, offload_param={"device": "cpu"}).model_dump()["offload_param"]["device"] == "cpu"
    )


@pytest.mark.parametrize("given", [{"stage": 4}, {"stge": 1}, {"offload_param": {"device": "gpu"}}])
def test_wrong_fields_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DeepSpeedZeroConfig(**given)


@pytest.mark.parametrize("scale", [True, -1, float("inf"), float("nan"), "x", []])
def test_a_loss_scale_is_a_number(scale: Any) -> None:
    with pytest.raises(ValidationError, match=r"number|greater"):
        DeepSpeedFP16Config(loss_scale=scale)


def test_what_a_dynamic_scale_needs() -> None:
    assert DeepSpeedFP16Config(loss_scale="3").loss_scale == 3.0
    assert DeepSpeedFP16Config(enabled=True, loss_scale=8, min_loss_scale=0).min_loss_scale == 0
    with pytest.raises(ValidationError, match="at least 1"):
        DeepSpeedFP16Config(enabled=True, loss_scale_window=0)
    scale = DeepSpeedFP16Config(initial_scale_power=4)
    assert scale.initial_dynamic_scale() == scale.dynamic_loss_scale_args()["init_scale"] == 16
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled


class Own(DeepSpeedConfigModel):
    """A script's own section."""

    size: int = 0
    names: list[str] | None = None
    name: str | None = Field(
        None,
        json_schema_extra={"deprecated": True, "new_param": "names", "new_param_fn": lambda value: [value]},
    )
    depth: int = Field(0, alias="old_depth")


def test_classes_of_a_script() -> None:
    assert Own(name="a").names == ["a"]
    assert Own(depth=3).depth == Own(old_depth=3).depth == 3
    assert Own(size="auto").size == 0
    with pytest.raises(AssertionError, match="name and names are the same key"):
        Own(name="a", names=["b"])
    with pytest.raises(ValidationError):
        Own(no_such=1)


def test_the_whole_config(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    given = {
        "train_batch_size": 64,
        "zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 7, "offload_param": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "checkpoint": {"tag_validation": "FAIL"},
        "sparse_attention": {"mode": "fixed"},  # the engine refuses it, and none is built
        "gradient_allreduce_op": "SUM",
    }
    file.write_text(json.dumps(given))
    read = DeepSpeedConfig(file)
    assert (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps, read.world_size) == (64, 1, 1)
    assert read.zero_enabled
    assert read.zero_optimization_stage == 3
    assert read.zero_config.max_reuse_distance == 7
    assert (read.optimizer_name, read.optimizer_params) == ("adamw", {"lr": 0.1})
    assert (read.scheduler_name, read.scheduler_params) == (None, None)
    assert read.checkpoint_tag_validation_fail
    assert read.gradient_allreduce_op == "sum"
    assert (read.grad_accum_dtype, read.amp_enabled, read.flops_profiler_config.profile_step) == (None, False, 1)
    assert read._param_dict == given
    with pytest.raises(AttributeError):
        read.no_such_attribute  # noqa: B018  # reading it is the test
    read.train_batch_size, read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps = None, 4, 2
    read._configure_train_batch_size()
    assert read.train_batch_size == 8


def test_ranks_with_other_data() -> None:
    class Groups:
        """What a script says of its ranks."""

        def get_data_parallel_world_size(self) -> int:
            return 4

    assert DeepSpeedConfig({"train_batch_size": 8}, mpu=Groups()).train_micro_batch_size_per_gpu == 2
    with pytest.raises(AssertionError, match="not divisible"):
        DeepSpeedConfig({"train_batch_size": 6}, mpu=Groups())
    with pytest.raises(ConfigError, match="no_such_key"):
        DeepSpeedConfig({"train_batch_size": 1, "no_such_key": 1})
