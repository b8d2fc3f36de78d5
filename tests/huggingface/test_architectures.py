"""Models that nobody adapted to the engine, of several families: they train as in plain torch.

`benchmarks/architectures.py` does the same with all families of its table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.train import families
from harness.train.hf_job import run_with_transformers

# What each has that others do not: nothing; experts that get other tokens on each rank; tied and shared embeddings,
# buffers and a bias that is read by several layers; weights computed from two parameters each; a state space; several
# models in one; batch normalisation; frozen parameters with trained ones beside them.
FAMILIES = (
    "transformers/llama",
    "transformers/mixtral",
    "transformers/t5",
    "transformers/wav2vec2",
    "transformers/mamba",
    "transformers/llava",
    "transformers/segformer",
    "peft/LoRA on llama",
)
SETTINGS = ("stage 2", "3 + offload")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one job noted of each family at each setting."""
    folder = tmp_path_factory.mktemp("architectures")
    entries = [f"{name}@{','.join(SETTINGS)}" for name in FAMILIES]
    result = run_with_transformers(folder, families.main, folder, *entries)
    raised = [json.loads(path.read_text())["traceback"] for path in sorted(folder.glob("error_of_rank_*.json"))]
    assert result.code == 0, "\n".join([*raised, result.out, result.err])
    noted: dict[str, dict[str, Any]] = {name: {} for name in FAMILIES}
    for line in (folder / "results.jsonl").read_text().splitlines():
        values = json.loads(line)
        if "family" in values:
            noted[values["family"]][values["setting"]] = values
    return noted


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_trains_as_in_plain_torch(found: dict[str, dict[str, Any]], family: str) -> None:
    assert "error" not in found[family]["plain torch"]
    for setting in SETTINGS:
        outcome = found[family][setting]
        assert outcome["loss"] <= 1e-5, outcome
        assert outcome["weight"] <= 1e-5, outcome


def test_a_difference_is_seen(tmp_path: Path) -> None:
    worst_loss, worst_weight = families.worst_loss, families.worst_weight
    expected = families.Expected([[1.0, 2.0]], {"a": torch.ones(4)}, {"a": torch.tensor([True, False, False, False])})
    assert worst_loss([[1.0, 2.2]], expected.losses) == pytest.approx(0.1)
    assert worst_weight({"a": torch.tensor([9.0, 1.0, 1.0, 1.0])}, expected) == (0.0, "")
    assert worst_weight({"a": torch.tensor([1.0, 1.0, 2.0, 1.0])}, expected) == (0.5, "a")
    assert worst_weight({"a": torch.tensor([1.0, 1.0, float("nan"), 1.0])}, expected)[1] == "a"
    assert worst_weight({}, expected)[0] == float("inf")
