"""Behaviour that Hugging Face's own tests look at, where no other test here holds it."""

from __future__ import annotations

from typing import Any

import pytest
from harness.train.hf_job import returned, run_cases

CASES = ["disk", "config_object", "plugin", "prepared", "arange"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the cases returned, on every rank."""
    return run_cases(tmp_path_factory.mktemp("upstream"), "huggingface.upstream_cases", CASES)


def test_offload_to_disk_changes_no_loss(found: dict[str, list[Any]]) -> None:
    for losses in returned(found, "disk"):
        assert losses["disk"] == pytest.approx(losses["memory"], rel=1e-6)
        assert len(losses["disk"]) == 4


def test_one_config_is_in_force_at_a_time(found: dict[str, list[Any]]) -> None:
    expected = [[True, 3], [True, 3], [False, 2], [False, None]]
    assert returned(found, "config_object") == [expected, expected]


def test_the_plugin_of_accelerate(found: dict[str, list[Any]]) -> None:
    for result in returned(found, "plugin"):
        assert (result["flags"], result["stage"]) == ([False, True], 2)
        assert "Please specify the ZeRO optimization config" in result["refused"]["no section"]
        assert "not found in kwargs" in result["refused"]["auto"]


def test_what_accelerate_prepares_is_ours(found: dict[str, list[Any]]) -> None:
    for result in returned(found, "prepared"):
        assert result["is engine"]
        assert result["classes"] == ["DeepSpeedOptimizerWrapper", "AcceleratedScheduler"]
        assert (result["batch"], result["untested"]) == ([8, 4], True)


def test_tables_of_positions_are_not_rounded(found: dict[str, list[Any]]) -> None:
    for difference, is_bf16 in returned(found, "arange"):
        assert difference < 1e-6
        assert is_bf16
