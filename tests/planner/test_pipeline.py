"""What a pipeline rank has, in the planner: the stages that models are really divided into."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from harness.train import split_models

from launcher.base.errors import ConfigError
from launcher.config.load import load_config
from launcher.config.schema_parallel import Pipeline
from launcher.parallel.pipeline.divide import stage_model
from launcher.planner.estimate import Machines, estimate, rank_parts
from launcher.planner.memory import Workload, activation_bytes
from launcher.planner.model import ModelFacts, Parameter, TransformerShape, typical_model
from launcher.planner.settings import at, ladder, micro_batch_of, resolve, setting_of
from launcher.sharding.pipeline import PipelinePlan

SHAPE = TransformerShape(num_layers=8, hidden_size=64, num_heads=4, vocab_size=100)
MODEL = typical_model(8 * 12 * 64**2 + 6400, SHAPE)


def config_of(**keys: Any) -> Any:
    pipeline = {"stages": 4, **keys.pop("pipeline", {})}
    given = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8, "pipeline": pipeline, **keys}
    return resolve(load_config(given).config, 8, None)


@pytest.mark.parametrize("name", ["llama", "llama with biases", "gpt2", "bloom"])
def test_stages_have_the_parameters_that_real_ones_have(name: str) -> None:
    if not split_models.has(name):
        pytest.skip("transformers is not installed")
    model = split_models.build(name)
    shape = replace(SHAPE, num_layers=2, vocab_size=split_models.VOCABULARY)
    facts = ModelFacts(name, "", tuple(Parameter(own, param.numel()) for own, param in model.named_parameters()), shape)
    wanted = [stage.num_params for stage in stage_model(model, (0,), 2, Pipeline()).stages]
    assert [part.model.num_params for part in rank_parts(facts, PipelinePlan(2))] == wanted


@pytest.mark.parametrize(("method", "blocks"), [("uniform", [4, 4]), ("type:Block", [4, 4]), ("parameters", [3, 5])])
def test_the_method_of_the_config_counts(method: str, blocks: list[int]) -> None:
    model = typical_model(8 * 12 * 64**2 + 10**5, SHAPE, 10**5)  # with an embedding of two blocks
    parts = rank_parts(replace(model, shape=None), PipelinePlan(2), method)
    assert [len({param.name.split(".")[1] for param in part.model.params} - {"weight"}) for part in parts] == blocks


def test_ranks_keep_what_their_schedule_has_in_flight() -> None:
    work = Workload(2, 16)
    whole, head = (activation_bytes(replace(SHAPE, num_layers=layers), work, 2) for layers in (8, 0))
    block = (whole - head) // 8

    def kept(schedule: str, num_virtual: int = 1) -> list[int]:
        plan = PipelinePlan(4, num_virtual, schedule, 8)
        return [activation_bytes(SHAPE, work, 2, 1, part.share) for part in rank_parts(MODEL, plan)]

    assert kept("1f1b") == [8 * block, 6 * block, 4 * block, 2 * block + head]
    assert kept("gpipe") == [16 * block, 16 * block, 16 * block, 16 * block + 8 * head]
    assert kept("zero_bubble") == [8 * block, 8 * block, 8 * block, 8 * block + head]
    assert kept("interleaved_1f1b", 2) == [11 * block, 9 * block, 7 * block, 5 * block + head]
    assert kept("zero_bubble_v", 2) == [8 * block + head, 8 * block, 8 * block, 8 * block]


def test_an_estimate_is_that_of_the_rank_that_needs_most() -> None:
    base = config_of(zero_optimization={"stage": 1})
    machines = Machines(gpus_per_node=8)
    found = estimate(MODEL, machines, [setting_of(base, 8)], base, Workload(2, 16))
    alone = resolve(
        load_config({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}).config, 2, None
    )
    without = estimate(MODEL, Machines(gpus_per_node=2), [setting_of(alone, 2)], alone, Workload(2, 16))
    memory, whole = found.rows[0].memory, without.rows[0].memory
    parts = rank_parts(MODEL, PipelinePlan(4, num_micro_batches=8))
    largest = max(part.model.num_params for part in parts)
    assert memory.parameters in [4 * part.model.num_params for part in parts]
    assert memory.parameters <= 4 * largest < whole.parameters
    assert micro_batch_of(base, 8) == 2
    assert found.as_json()["rows"][0]["pipeline_idle_fraction"] == pytest.approx(3 / 11)
    assert found.as_json()["rows"][0]["config"]["pipeline"] == {"stages": 4}
    assert found.rows[0].refusals == ()


def test_the_ladder_of_a_pipeline_has_what_it_runs_with() -> None:
    rungs = ladder(config_of(pipeline={"schedule": "zero_bubble_v", "virtual_stages": 2}), 8)
    assert [(rung.stage, rung.offload_label) for rung in rungs] == [(0, "none"), (1, "none"), (1, "optimizer cpu")]
    assert all(rung.pipeline == PipelinePlan(4, 2, "zero_bubble_v", 8) for rung in rungs)


def test_a_config_without_a_number_of_micro_batches_has_one_for_each_stage() -> None:
    given = {"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 4}}
    open_ended = resolve(load_config(given).config, 8, None)
    assert setting_of(at(open_ended, 0, "none", "none"), 8).pipeline.num_micro_batches == 4


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="8 layers cannot be divided into 16 stages"):
        rank_parts(MODEL, PipelinePlan(16))
