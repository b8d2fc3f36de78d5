"""Adapters of peft on the engine, and the trainers of trl, which are long and run in the soak."""

from __future__ import annotations

from typing import Any

import pytest
from harness.train.hf_job import returned, run_cases

PEFT_CASES = ["lora"]
SOAK_CASES = ["lora_checkpointed", "prompt_tuning", "sft", "dpo", "reward", "grpo"]
MODULE = "huggingface.adapters_cases"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the cases of peft returned, on every rank."""
    return run_cases(tmp_path_factory.mktemp("peft"), MODULE, PEFT_CASES)


@pytest.fixture(scope="module")
def long_found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the long cases returned, on every rank."""
    return run_cases(tmp_path_factory.mktemp("trl"), MODULE, SOAK_CASES)


def test_lora_trains_saves_and_loads_alike_at_stages_2_and_3(found: dict[str, list[Any]]) -> None:
    for rank in returned(found, "lora"):
        assert rank["losses 2"] == pytest.approx(rank["losses plain"], rel=3e-5)
        assert rank["losses 3"] == pytest.approx(rank["losses plain"], rel=3e-5)
        assert len(rank["losses 3"]) == 3
        assert rank["trained 2"] == rank["trained 3"] == ["lora", "modules_to_save"]
        assert rank["equal"]
        assert (rank["sharded equal"], rank["merged"]) == ([], [])


@pytest.mark.soak
def test_lora_with_activation_checkpointing(long_found: dict[str, list[Any]]) -> None:
    for rank in returned(long_found, "lora_checkpointed"):
        assert rank["reentrant"] == pytest.approx(rank["none"], rel=1e-6)
        assert rank["not reentrant"] == pytest.approx(rank["none"], rel=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["prompt_tuning", "reward"])
def test_losses_are_those_of_stage_2(name: str, long_found: dict[str, list[Any]]) -> None:
    for of_stage_2, of_stage_3 in returned(long_found, name):
        assert of_stage_3 == pytest.approx(of_stage_2, rel=3e-5)
        assert of_stage_3[-1] < of_stage_3[0]


@pytest.mark.soak
def test_supervised_fine_tuning_is_that_without_zero(long_found: dict[str, list[Any]]) -> None:
    for rank in returned(long_found, "sft"):
        for name in ("2", "3"):
            assert rank[name] == pytest.approx(rank["plain"], rel=3e-5)
        assert rank["lora 3"] == pytest.approx(rank["lora 2"], rel=3e-5)


@pytest.mark.soak
def test_preference_optimisation_has_an_engine_for_the_reference(long_found: dict[str, list[Any]]) -> None:
    for rank in returned(long_found, "dpo"):
        assert rank["losses 3"] == pytest.approx(rank["losses 2"], rel=3e-5)
        assert (rank["reference 2"], rank["reference 3"]) == ("DeepSpeedEngine", "DeepSpeedEngine")


@pytest.mark.soak
def test_policy_optimisation_generates_from_gathered_and_from_sharded_parameters(
    long_found: dict[str, list[Any]],
) -> None:
    for rank in returned(long_found, "grpo"):
        assert rank["3"] == rank["2"]
        assert rank["3 sharded"] == rank["2"]
