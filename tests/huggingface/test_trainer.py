"""transformers' Trainer on the engine, unmodified: what it logs."""

from __future__ import annotations

from typing import Any

import pytest
from harness.hf_job import returned, run_cases

CASES = ["stage_2", "stage_3"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the cases returned, on every rank."""
    return run_cases(tmp_path_factory.mktemp("trainer"), "huggingface.trainer_cases", CASES)


def test_stages_2_and_3_have_the_same_losses(found: dict[str, list[Any]]) -> None:
    of_stage_2, of_stage_3 = returned(found, "stage_2"), returned(found, "stage_3")
    assert of_stage_2[0] == of_stage_2[1] == pytest.approx(of_stage_3[0], rel=1e-5)
    assert len(of_stage_2[0]) == 4
