"""transformers' Trainer on the engine: what it saves, resumes from and evaluates."""

from __future__ import annotations

from typing import Any

import pytest
from harness.train.hf_job import returned, run_cases

pytestmark = pytest.mark.long  # two dozen runs of the Trainer; its training and pretrained models are tested each time
MODULES = "huggingface.saving_cases,huggingface.evaluating_cases"
RESUMED = ["stage_2_own_optimizer", "stage_3", "stage_3_offload"]
RESUMED_ALSO = ["stage_0", "stage_2", "stage_2_offload"]
CASES = [
    *["one_rank", "one_to_two", "two_ranks", "two_to_one"],
    *[f"resume_{name}" for name in RESUMED],
    *["resumed_by_true", "limit", "best_at_end_stage_3", "only_model", "save_model", "not_gathered", "bad_checkpoints"],
    *["asynchronous", "asynchronous_best"],
    *["evaluate_alone", "evaluate_alone_stage_2", "generate_at_evaluation", "example", "best"],
]
MORE_CASES = [
    *[f"resume_{name}" for name in RESUMED_ALSO],
    "save_on_each_node",
    "best_at_end_stage_2",
    "evaluate_between",
]
Found = dict[str, list[Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the cases returned, on every rank."""
    return run_cases(tmp_path_factory.mktemp("saving"), MODULES, CASES)


@pytest.fixture(scope="module")
def found_in_soak(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What the cases of the long form returned."""
    return run_cases(tmp_path_factory.mktemp("saving_more"), MODULES, MORE_CASES)


def check_resumed(found: Found, name: str) -> None:
    """Check that a resumed run has the losses, rates and states of one that was not interrupted, bit for bit."""
    for rank in returned(found, name):
        check_equal(rank["whole"], rank["resumed"])


def check_equal(whole: dict[str, Any], resumed: dict[str, Any]) -> None:
    """Check one rank's runs of four steps, one of them resumed after the second."""
    assert len(whole["losses"]) == 4
    assert resumed["losses"] == whole["losses"]
    assert resumed["rates"] == whole["rates"]
    assert resumed["digests"]["begin-2"] == whole["digests"]["save-2"]
    assert resumed["end"] == whole["end"] != whole["digests"]["save-2"]


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_that_which_was_not_interrupted(found: Found, name: str) -> None:
    check_resumed(found, f"resume_{name}")


@pytest.mark.soak
@pytest.mark.parametrize("name", RESUMED_ALSO)
def test_a_resumed_run_is_that_which_was_not_interrupted_at_more_settings(found_in_soak: Found, name: str) -> None:
    check_resumed(found_in_soak, f"resume_{name}")


def test_true_resumes_from_the_last_checkpoint(found: Found) -> None:
    for rank, whole in zip(returned(found, "resumed_by_true"), returned(found, "resume_stage_3_offload"), strict=True):
        check_equal(whole["whole"], rank)


@pytest.mark.parametrize(("before", "after"), [("one_rank", "one_to_two"), ("two_ranks", "two_to_one")])
def test_a_run_continues_on_another_number_of_ranks(found: Found, before: str, after: str) -> None:
    whole, resumed = returned(found, before)[0], returned(found, after)[0]
    assert resumed["digests"]["begin-5"] == whole["digests"]["save-5"]
    assert len(resumed["losses"]) == 10
    is_rounded = whole["losses"] == [round(loss, 4) for loss in whole["losses"]]  # by transformers 4
    assert resumed["losses"] == pytest.approx(whole["losses"], rel=1e-5, abs=1.01e-4 if is_rounded else 0.0)
    assert resumed["rates"] == whole["rates"]


def test_checkpoints_over_the_limit_are_removed(found: Found) -> None:
    for rank in returned(found, "limit"):
        assert rank == {"steps": ["checkpoint-3", "checkpoint-4"], "epochs": ["checkpoint-4"]}


def steps_that_got_better(losses: list[float]) -> list[int]:
    """Return the steps whose loss, the greater the better here, is above those of all before."""
    return [step for step in range(1, 5) if losses[step - 1] > max([0.0, *losses[: step - 1]])]


def test_models_that_are_better_are_saved(found: Found) -> None:
    for rank in returned(found, "best"):
        better = steps_that_got_better(rank["losses"])
        assert 1 < len(better) < 4
        assert rank["folders"] == [f"checkpoint-{step}" for step in better]


def check_best_at_end(found: Found, name: str) -> None:
    """Check that the best of four models is the one at the end."""
    for rank in returned(found, name):
        best = steps_that_got_better(rank["losses"])[-1]
        assert 1 < best < 4, rank["losses"]
        assert rank["best"] == f"checkpoint-{best}"
        assert rank["end"] == rank["saved"][f"save-{best}"]
        assert rank["loss_at_end"] == rank["losses"][best - 1]


def test_the_best_model_is_loaded_at_the_end(found: Found) -> None:
    check_best_at_end(found, "best_at_end_stage_3")


@pytest.mark.soak
def test_the_best_model_is_loaded_at_the_end_at_stage_2(found_in_soak: Found) -> None:
    check_best_at_end(found_in_soak, "best_at_end_stage_2")


def test_a_trainer_waits_for_an_asynchronous_save_before_it_looks_for_it(found: Found) -> None:
    for rank in returned(found, "asynchronous_best"):
        assert rank["folders"] == [rank["best"]] == ["checkpoint-2"]
        assert rank["end"] == rank["saved"]["save-2"] != rank["saved"]["save-1"]
    assert 0 not in returned(found, "asynchronous_best")[0]["num_there"]  # of one that is kept, none is removed before
    check_resumed(found, "asynchronous")
    for rank in returned(found, "asynchronous"):
        assert rank["num_there"] == [0, 1, 2]  # at each of two saves, and at the end


def test_only_the_model_is_saved_where_that_was_asked_for(found: Found) -> None:
    for rank in returned(found, "only_model"):
        assert rank["equal"]
        assert "model.safetensors" in rank["names"]
        assert not [name for name in rank["names"] if name.startswith(("global_step", "rng_state", "latest"))]
        assert "Can't find a valid checkpoint" in rank["resume"]
        assert "save_only_model" in rank["with_best"]


def test_a_saved_model_loads_without_the_engine(found: Found) -> None:
    for rank in returned(found, "save_model"):
        assert rank == {stage: {"equal": True, "tied": True} for stage in ("2", "3")}


@pytest.mark.soak
def test_each_node_saves_what_it_needs_to_resume(found_in_soak: Found) -> None:
    check_resumed(found_in_soak, "save_on_each_node")
    for number, rank in enumerate(returned(found_in_soak, "save_on_each_node")):
        assert {"global_step2", "latest", f"rng_state_{number}.pth"} <= set(rank["names"])


def test_weights_that_were_not_gathered_are_joined_by_the_script_in_the_folder(found: Found) -> None:
    first = returned(found, "not_gathered")[0]
    assert first["code"] == 0, first["said"]
    for name, more in (("checkpoint", "checkpoint-4"), ("final", "final")):
        assert {"config.json", "global_step4", "latest", "zero_to_fp32.py"} <= set(first[name])
        assert "model.safetensors" not in first[name]
        assert first[f"{more}_equal"]


def test_a_trainer_evaluates_without_training(found: Found) -> None:
    for rank in returned(found, "evaluate_alone"):
        assert rank["rows"][0] == 5
        assert rank["close"]
        assert rank["loss"] == pytest.approx(rank["expected"], rel=1e-5)
        assert rank["optimizer"] is False
    for said in returned(found, "evaluate_alone_stage_2"):
        assert "ZeRO inference only makes sense with ZeRO Stage 3" in said


@pytest.mark.soak
def test_evaluation_leaves_the_training_as_it_is(found_in_soak: Found) -> None:
    for rank in returned(found_in_soak, "evaluate_between"):
        assert rank["plain"] == rank["evaluated"]


def test_ranks_generate_sentences_of_different_lengths(found: Found) -> None:
    for rank in returned(found, "generate_at_evaluation"):
        assert rank["same"], rank
        assert len({tuple(row) for row in rank["generated"]}) > 1


def test_a_checkpoint_that_cannot_be_loaded_is_named(found: Found) -> None:
    for rank in returned(found, "bad_checkpoints"):
        assert "/empty" in rank["empty"]
        assert "damaged/checkpoint-4/global_step4/rank-0000" in rank["damaged"]
        assert "load another one" in rank["damaged"]
        assert "good/checkpoint-4/global_step4" in rank["other"]
        assert "has the shape [128, 32] in the checkpoint, [128, 64] in the model" in rank["other"]
        assert "a model of the same configuration" in rank["other"]


def test_the_example_learns_and_continues(found: Found) -> None:
    first, second = returned(found, "example")
    steps = {line.split()[1]: float(line.split()[3]) for line in first["first"]}
    assert steps.keys() == {"1", "10"}
    assert steps["10"] < steps["1"] - 0.5
    assert first["second"][0] == "continuing at step 10"
    assert first["second"][1].startswith("step 12 loss ")
    assert second["first"] == second["second"] == []
    assert "model.safetensors" in first["files"]
