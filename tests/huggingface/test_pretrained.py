"""from_pretrained, from_config and generate at ZeRO stage 3: sharded as models are built, and computing alike."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from harness.launch.command import ROOT
from harness.train.hf_job import returned, run_cases, run_with_transformers

CASES = [
    "formats",
    "missing_keys",
    "from_config",
    "buffers",
    "half",
    "resized",
    "generated",
    "generated_by_t5",
    "example",
    "sentences",
    "parts",
    "recomputed",
]
MODELS = ROOT / ".venv" / "models"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the cases returned, on every rank."""
    search = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(MODELS)]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", search)
        return run_cases(tmp_path_factory.mktemp("pretrained"), "huggingface.pretrained_cases", CASES)


def test_every_format_is_loaded_into_shards(found: dict[str, list[Any]]) -> None:
    for rank in returned(found, "formats"):
        assert {name: (loaded["sharded"], loaded["differing"]) for name, loaded in rank.items()} == dict.fromkeys(
            ("one", "several", "bf16", "torch"), (True, [])
        )
        assert [rank[name]["tied"] for name in ("one", "several", "bf16", "torch")] == [False, True, True, False]
        assert (rank["one"]["files"], rank["several"]["files"], rank["torch"]["files"]) == (1, 6, 0)
        assert rank["bf16"]["dtype"] == "torch.bfloat16"


def test_what_a_checkpoint_does_not_have_is_initialised_as_in_plain_torch(found: dict[str, list[Any]]) -> None:
    assert returned(found, "missing_keys") == [[True, []]] * 2


def test_a_model_from_a_config_is_sharded_and_initialised(found: dict[str, list[Any]]) -> None:
    first, second = returned(found, "from_config")
    assert first == second
    assert first["sharded"]
    assert first["deviations"] == pytest.approx([0.02] * len(first["deviations"]), rel=0.1)
    assert first["norms"] == [[1.0]] * 5
    assert first["padding"] == 0.0


def test_buffers_of_a_checkpoint_are_on_every_rank(found: dict[str, list[Any]]) -> None:
    for sharded, differing, distance in returned(found, "buffers"):
        assert (sharded, differing) == (True, [])
        assert distance <= 1e-6


def test_rotary_frequencies_stay_in_fp32_in_16_bit_models(found: dict[str, list[Any]]) -> None:
    for losses, rounded, dtypes in returned(found, "half"):
        assert losses == [losses[0]] * 3
        assert rounded != losses[0]
        assert set(dtypes) == {"torch.float32"}


@pytest.mark.parametrize("name", ["grown", "grown_tied", "shrunk", "shrunk_tied"])
def test_the_vocabulary_is_resized_trained_and_saved(name: str, found: dict[str, list[Any]]) -> None:
    for rank in returned(found, "resized"):
        resized = rank[name]
        assert (resized["at_start"], resized["differing"]) == ([], [])
        assert max(resized["distances"]) <= 1e-5
        assert resized["tied"] == name.endswith("_tied")
        size = 140 if name.startswith("grown") else 100
        assert (resized["shape"], resized["vocab_size"]) == ([size, 32], size)


def test_ranks_generate_texts_of_different_lengths(found: dict[str, list[Any]]) -> None:
    short, long = returned(found, "generated")
    for name in ("greedy", "beams", "sampled"):
        assert (short[name], long[name]) == ([True, 3 + 3], [True, 6 + 7])
    assert [(rank["engine"], rank["released"]) for rank in (short, long)] == [(True, True)] * 2
    assert returned(found, "generated_by_t5") == [[True, True]] * 2


@pytest.mark.skipif(not MODELS.is_dir(), reason="the models are not installed")
def test_embeddings_of_sentences_are_those_of_plain_torch(found: dict[str, list[Any]]) -> None:
    for sharded, before, after, moved in returned(found, "sentences"):
        assert sharded
        assert max(before, after) <= 1e-6 < moved


def test_parts_of_a_model_are_called_by_themselves(found: dict[str, list[Any]]) -> None:
    for rank in returned(found, "parts"):
        assert rank.pop("after a step") <= 1e-6
        assert set(rank.values()) == {True}


def test_the_example_answers_with_parameters_in_memory_and_on_disk(found: dict[str, list[Any]], tmp_path: Path) -> None:
    assert returned(found, "example") == [["out=Positive"] * 2, ["out=negative"] * 2]
    example = ROOT / "examples" / "hf_zero3_inference.py"
    result = run_with_transformers(tmp_path, example)
    assert result.code == 0, result.out + result.err
    assert "out=Positive" in result.out
    assert "out=negative" in result.out


def test_a_model_recomputes_its_layers_where_the_config_says_so(found: dict[str, list[Any]]) -> None:
    for rank in returned(found, "recomputed"):
        losses, num_forwards = rank["False"]
        assert num_forwards == 2
        assert rank["True"] == [losses, 4]
