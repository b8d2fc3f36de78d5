"""The end of a training script: no race between ranks that leave and the last step's exchange."""

from __future__ import annotations

import time
from pathlib import Path

from harness import scripts
from harness.launching import run_launch

TRAIN = """
    import os, sys, time, torch, launcher
    config = {{"train_micro_batch_size_per_gpu": 4, "steps_per_print": 0, "zero_optimization": {{"stage": 2}},
               "optimizer": {{"type": "AdamW", "params": {{"lr": 0.05}}}}}}
    model = torch.nn.Sequential(*(torch.nn.Linear(600, 600) for _ in range(4)))
    engine, *_ = launcher.initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 600)).mean())
        engine.step()
    {end}
"""


def test_ranks_may_leave_right_after_a_step(tmp_path: Path) -> None:
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        result = run_launch(folder, "--num_gpus", "4", scripts.write(folder, TRAIN.format(end="")))
        assert result.code == 0, result.err


def test_an_exception_waits_for_nobody(tmp_path: Path) -> None:
    end = "if os.environ['RANK'] == '1': raise ValueError('bad'); time.sleep(600)".replace("; time", "\n    time")
    start_s = time.monotonic()
    result = run_launch(tmp_path, "--num_gpus", "2", scripts.write(tmp_path, TRAIN.format(end=end)))
    assert result.code == 1
    assert "ValueError: bad" in result.err
    assert time.monotonic() - start_s < 40
