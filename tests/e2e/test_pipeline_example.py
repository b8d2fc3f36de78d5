"""The example of a pipeline as a user runs it: on two ranks, and on eight with three axes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness.launch.command import ROOT
from harness.train.forked import run_ranks

EXAMPLE = ROOT / "examples" / "pipeline.py"


def _losses(folder: Path, num_ranks: int, config: str) -> tuple[list[float], str]:
    arguments = ("--deepspeed", ROOT / f"examples/configs/{config}.json", "--steps", "10", "--context", "16")
    result = run_ranks(folder, num_ranks, EXAMPLE, *arguments)
    assert result.code == 0, result.out + result.err
    closing = re.search(r"loss ([\d.]+) -> ([\d.]+) \(validation ([\d.]+)\)", result.out)
    assert closing is not None, result.out
    return [float(loss) for loss in closing.groups()], result.out


def test_two_stages_train(tmp_path: Path) -> None:
    (first, last, validation), out = _losses(tmp_path, 2, "pipeline")
    assert last < first < 5.8
    assert validation < first
    assert "pipeline: 1f1b, 2 stages, 4 micro-batches a step, idle for 20% of it in theory" in out
    assert re.search(r"pipeline: rank 0 was idle for \d+% of step 10 \(1f1b: 20% in theory\)", out)


@pytest.mark.long
def test_three_axes_train_together(tmp_path: Path) -> None:
    (first, last, _), out = _losses(tmp_path, 8, "3d")
    assert last < first < 5.8
    assert "mesh: 2 (pipeline) × 2 (data) × 2 (tensor) = 8 ranks" in out
    assert "zero stage 1" in out
