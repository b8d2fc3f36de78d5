"""transformers and accelerate on ranks that have parts of sequences: the losses and norms of whole sequences."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from harness.train.hf_job import returned, run_cases

CASES = ["sequence_parallel", "sequence_parallel_resumed", "sequence_parallel_evaluated"]
CASES += ["accelerate_sequence_parallel", "masks", "reads", "both_directions", "own_positions", "generates", "refused"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank returned, by case; all of them run in one job."""
    return run_cases(tmp_path_factory.mktemp("sequence"), "huggingface.sequence_cases", CASES)


since_5 = pytest.mark.skipif(
    metadata.version("transformers") < "5",
    reason="the Trainer of transformers 4 cuts no batches, and its ModernBERT has an attention of its own",
)


@pytest.mark.long
def test_every_stage_trains_as_one_process_does(tmp_path: Path) -> None:
    found = run_cases(tmp_path, "huggingface.sequence_cases", ["every_stage"], num_ranks=4)
    for run in returned(found, "every_stage"):
        alone = run.pop("alone")
        assert (len(run), len(alone)) == (4, 20)
        for name, losses in run.items():
            assert losses == pytest.approx(alone, rel=1e-6), name


@since_5
def test_the_trainer_trains_as_ddp_does(found: dict[str, list[Any]]) -> None:
    logs = returned(found, "sequence_parallel")
    # The batches of both ranks come one after another, and the Trainer divides losses by their number.
    losses = [loss / 2 for pair in zip(*(log["plain"]["losses"] for log in logs), strict=True) for loss in pair]
    for log in logs:
        plain = log.pop("plain")
        assert len(log) == 2
        for run in log.values():
            assert run["losses"] == pytest.approx(losses, rel=1e-6)
            assert run["norms"] == pytest.approx(plain["norms"], rel=1e-5)
            assert run["rates"] == plain["rates"]


@since_5
def test_a_run_of_the_trainer_resumes_within_an_epoch(found: dict[str, list[Any]]) -> None:
    for run in returned(found, "sequence_parallel_resumed"):
        assert len(run["whole"]) == 8
        assert run["resumed"] == run["whole"][4:]


@since_5
def test_each_rank_evaluates_samples_of_its_own(found: dict[str, list[Any]]) -> None:
    for run in returned(found, "sequence_parallel_evaluated"):
        assert run["trainer"] == pytest.approx(run["alone"], rel=1e-6)


def test_a_loop_of_accelerate_trains_as_torch_alone_does(found: dict[str, list[Any]]) -> None:
    for run in returned(found, "accelerate_sequence_parallel"):
        assert len(run["alone"]) == 8
        assert run["accelerate"] == pytest.approx(run["alone"], rel=1e-6)


def test_masks_and_documents_are_those_of_whole_sequences(found: dict[str, list[Any]]) -> None:
    for run in returned(found, "masks"):
        assert len(run) == 10
        for name, pair in run.items():
            assert pair["parts"] == pytest.approx(pair["alone"], rel=1e-6), name


def test_positions_that_were_made_here_are_neither_gathered_nor_read(found: dict[str, list[Any]]) -> None:
    for run in returned(found, "reads"):
        known = [run.pop(name) for name in ("made here", "made by a loader", "none")]
        assert known == [[0, 0]] * 3
        assert len(run) == 4
        for name, (num_gathers, num_waits) in run.items():
            assert num_gathers == 1, name
            assert num_waits > 0, name


@since_5
def test_attention_in_both_directions_is_that_of_whole_sequences(found: dict[str, list[Any]]) -> None:
    for run in returned(found, "both_directions"):
        assert run["parts"] == pytest.approx(run["alone"], rel=1e-6)


def test_positions_that_a_model_counts_itself_are_asked_for(found: dict[str, list[Any]]) -> None:
    for run in returned(found, "own_positions"):
        said, losses = run.pop("roberta")
        assert "RobertaForMaskedLM counts positions from 2, and those of the batch begin at 0" in said
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        said, losses = run.pop("opt")
        assert "OPTForCausalLM leaves out padding when it counts positions" in said
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_every_rank_generates_from_the_whole_text(found: dict[str, list[Any]]) -> None:
    for alone, own in returned(found, "generates"):
        assert own == alone


def test_what_does_not_fit_is_refused(found: dict[str, list[Any]]) -> None:
    for said in returned(found, "refused"):
        assert "would shift labels within each part" in said["labels"]
        assert "got parts of different sizes" in said["lengths"]
        assert "attention_mask is not of this rank's part, 2 × 4 tokens" in said["a mask over pairs"]
        assert "2 ranks of one sequence do not divide 1 attention heads" in said["heads"]
        assert 'the attention "eager" cannot exchange heads' in said["eager"]
        assert "mix tokens without attention" in said["recurrent"]
        assert "encoder-decoders" in said["encoder"]
        assert '"flash_attention_2" is not the model\'s, which is "sdpa"' in said["another attention"]
        assert "seq_length 7 is not a multiple of the 2 ranks" in said["length"]
        assert "sequence_parallel_size 1 is not the 2 ranks" in said["config"]
        assert "different numbers of batches" in said["short loader"]
        assert "2 ranks do not divide a sequence of 5 tokens" in said["odd loader"]
