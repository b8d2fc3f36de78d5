"""`pipeline`: what its keys allow, alone and beside the others."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.base.errors import ConfigError
from launcher.config.equations import mesh_sizes
from launcher.config.load import load_config
from launcher.config.rules import pipeline_plan
from launcher.sharding.pipeline import PipelinePlan

BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8}


def config_of(pipeline: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {**BATCH, "pipeline": pipeline, **keys}


def test_the_keys_of_deepspeed_are_read_and_two_have_no_effect() -> None:
    loaded = load_config(
        config_of({"stages": "auto", "partition": "type:block", "seed_layers": True, "pipe_partitioned": False})
    )
    assert [notice.where for notice in loaded.notices] == ["config"]
    assert "pipeline.pipe_partitioned false has no effect: whole activations are sent" in str(loaded.notices[0])
    assert loaded.config.pipeline.partition == "type:block"
    assert loaded.config.pipeline.schedule == "1f1b"


@pytest.mark.parametrize("stages", ["auto", None])
def test_the_model_says_how_many_stages_there_are(stages: Any) -> None:
    config = load_config(config_of({"stages": stages}), world_size=4, model_stages=2).config
    assert config.pipeline.stages == 2
    assert mesh_sizes(config, 4).shape == (2, 2, 1, 1)
    assert pipeline_plan(config, 8) == PipelinePlan(2, 1, "1f1b", 8)
    without = load_config(config_of({"stages": stages}), world_size=4).config
    assert mesh_sizes(without, 4).pipeline == 1
    assert pipeline_plan(without, 8) is None


def test_the_batch_counts_ranks_beside_the_pipeline() -> None:
    keys = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}
    load_config({**keys, "gradient_accumulation_steps": 8}, world_size=4, model_stages=2)
    with pytest.raises(ConfigError, match=r"train_batch_size 32 is not divisible by 2 \(micro\) × 3"):
        load_config({**keys, "pipeline": {"stages": 2}}, world_size=6)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (config_of({"stages": 0}), "an integer of at least 1, or null", ""),
    (config_of({"stages": 3}), "3 (pipeline) × 1 (data) = 3 does not divide the 4 ranks", "start 3 or 6 ranks"),
    (config_of({"stages": 2}, zero_optimization={"stage": 2}), "ZeRO stage 2 sums gradients", "use stage 0 or 1"),
    (config_of({"stages": 2}, zero_optimization={"stage": 3}), "ZeRO stage 3 gathers parameters", "use stage 0 or 1"),
    (config_of({"schedule": "pipedream"}), 'expected one of "gpipe", "1f1b"', ""),
    (
        config_of({"stages": 2}, managed_gradient_accumulation=False),
        "not supported with pipeline parallelism",
        "remove it",
    ),
    (config_of({"stages": 2, "virtual_stages": 2}), "1f1b has 1 stage on each rank, not 2", "interleaved_1f1b"),
    (
        config_of({"stages": 2, "schedule": "interleaved_1f1b"}),
        "interleaved_1f1b has at least 2 stages on each rank, not 1",
        'set "virtual_stages": 2',
    ),
    (
        config_of({"stages": 2, "schedule": "zero_bubble_v", "virtual_stages": 3}),
        "zero_bubble_v has 2 stages on each rank, not 3",
        'set "virtual_stages": 2',
    ),
    (
        config_of({"stages": 1, "schedule": "interleaved_1f1b", "virtual_stages": 2}),
        "virtual_stages 2 divides the stages of several ranks",
        "remove virtual_stages",
    ),
    (
        config_of({"stages": 2, "schedule": "zero_bubble"}) | {"gradient_accumulation_steps": 5},
        "zero_bubble runs 5 micro-batches on 2 ranks in 2 equal rounds, and 2 does not divide 5",
        "use 4 or 6 micro-batches",
    ),
    (config_of({"partition": "layers"}), 'there is no partition by "layers"', '"uniform"'),
    (config_of({"partition": "type:(block"}), '"(block" is not a regular expression', ""),
]


@pytest.mark.parametrize(("data", "message", "hint"), REFUSED, ids=[row[1][:40] for row in REFUSED])
def test_what_does_not_fit_is_refused_with_its_reason(data: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(data, world_size=4)
    assert message in str(caught.value)
    assert hint in str(caught.value)


def test_a_model_of_other_stages_contradicts_the_config() -> None:
    with pytest.raises(ConfigError, match=r"pipeline.stages 2 contradicts the model, which was built for 4"):
        load_config(config_of({"stages": 2}), world_size=4, model_stages=4)
    load_config(config_of({"stages": 4}), world_size=4, model_stages=4)


@pytest.mark.parametrize(
    ("schedule", "steps", "slow"),
    [("1f1b", 3, "50% of it or more"), ("1f1b", 4, None), ("zero_bubble_v", 7, "7% of it or more")],
)
def test_too_few_micro_batches_are_reported(schedule: str, steps: int, slow: str | None) -> None:
    section = {"stages": 4, "schedule": schedule, "virtual_stages": 2 if schedule == "zero_bubble_v" else 1}
    data = config_of(section) | {"gradient_accumulation_steps": steps}
    found = [str(notice) for notice in load_config(data, world_size=4).notices]
    assert (slow is None) == (found == [])
    assert slow is None or slow in found[0]


def test_a_schedule_of_one_stage_has_no_effect() -> None:
    (notice,) = load_config(config_of({"schedule": "gpipe"}), world_size=4).notices
    assert 'pipeline.schedule "gpipe" has no effect: the model is one stage' in str(notice)
    assert load_config(config_of({"schedule": "gpipe"}), world_size=4, model_stages=4).notices == ()


def test_stage_1_may_offload_the_optimizer() -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    assert load_config(config_of({"stages": 2}, zero_optimization=zero), world_size=4).config.pipeline.stages == 2
