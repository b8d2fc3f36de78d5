"""LAUNCH_CONFIG_PATCH changes what engines are built with, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.base.errors import ConfigError
from launcher.config.load import load_config, patched
from launcher.planner.ladder import combined

CONFIG = {"zero_optimization": {"stage": 1, "overlap_comm": False}, "train_micro_batch_size_per_gpu": 4}


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ({}, CONFIG),
        ({"zero_optimization": {"stage": 3}}, {**CONFIG, "zero_optimization": {"stage": 3, "overlap_comm": False}}),
        ({"train_micro_batch_size_per_gpu": None}, {"zero_optimization": CONFIG["zero_optimization"]}),
        ({"bf16": {"enabled": True, "auto_cast": None}}, {**CONFIG, "bf16": {"enabled": True}}),
        ({"activation_checkpointing": {"blocks": None}}, CONFIG),
        ({"zero_optimization": 0}, {**CONFIG, "zero_optimization": 0}),
    ],
)
def test_merge(patch: dict[str, Any], expected: dict[str, Any]) -> None:
    assert patched(CONFIG, patch) == expected


def test_engines_alone_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCH_CONFIG_PATCH", '{"zero_optimization": {"stage": 3}}')
    assert load_config(CONFIG, is_of_engine=True).config.zero_optimization.stage == 3
    assert load_config(CONFIG, is_of_engine=True).config.zero_optimization.overlap_comm is False
    assert load_config(CONFIG).config.zero_optimization.stage == 1
    assert CONFIG["zero_optimization"] == {"stage": 1, "overlap_comm": False}


@pytest.mark.parametrize("patch", ['{"zero_optimization": {"stage": 9}}', "[1]", "{"])
def test_a_wrong_patch_is_named(monkeypatch: pytest.MonkeyPatch, patch: str) -> None:
    monkeypatch.setenv("LAUNCH_CONFIG_PATCH", patch)
    with pytest.raises(ConfigError, match=r"LAUNCH_CONFIG_PATCH|stage"):
        load_config(CONFIG, is_of_engine=True)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"zero_optimization": {"stage": None}}),
        ({"zero_optimization": {"stage": 3}}, {"zero_optimization": {"overlap_comm": None}}),
        ({"zero_optimization": {"stage": 3}}, {"zero_optimization": None, "bf16": {"enabled": True}}),
        ({"train_micro_batch_size_per_gpu": 8}, {"train_micro_batch_size_per_gpu": None}),
        ({"train_micro_batch_size_per_gpu": None}, {"train_micro_batch_size_per_gpu": 8}),
    ],
)
def test_one_patch_for_two(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert patched(CONFIG, combined(first, second)) == patched(patched(CONFIG, first), second)
