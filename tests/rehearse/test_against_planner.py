"""What the planner's formulas say of a world is what a rehearsed rank of it keeps."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from harness.train.rehearsed import rehearse_script

from launcher.config.load import load_config
from launcher.planner.memory import rank_memory
from launcher.planner.model import ModelFacts, Parameter
from launcher.planner.settings import setting_of

WIDTH, NUM_BLOCKS = 4096, 8
SCRIPT = f"""
    import json, sys, torch, launcher
    model = torch.nn.Sequential(*(torch.nn.Linear({WIDTH}, {WIDTH}) for _ in range({NUM_BLOCKS})))
    engine, *_ = launcher.initialize(model=model, config=json.loads(sys.argv[1]))
    dtype = next(engine.module.parameters()).dtype
    while True:
        engine.backward(engine(torch.ones(2, {WIDTH}, dtype=dtype)).float().mean())
        engine.step()
"""


def facts() -> ModelFacts:
    params = [(f"{index}.{name}", numel) for index in range(NUM_BLOCKS) for name, numel in SIZES.items()]
    return ModelFacts("blocks", "test", tuple(Parameter(name, numel) for name, numel in params))


SIZES = {"weight": WIDTH * WIDTH, "bias": WIDTH}


@pytest.mark.parametrize("world_size", [1, 64])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_model_states(tmp_path: Path, stage: int, world_size: int) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    planned = rank_memory(facts(), setting_of(load_config(config).config, world_size), world_size)
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    found, result = rehearse_script(
        tmp_path, tmp_path / "train.py", json.dumps(config), rank=world_size - 1, world_size=world_size
    )
    assert found.error is None, result.err
    kept = found.peaks["forward"]
    assert kept["parameters"] == pytest.approx(planned.parameters, rel=0.02)
    assert kept["gradients"] == pytest.approx(planned.gradients, rel=0.02)
    assert kept["optimizer"] == pytest.approx(planned.optimizer, rel=0.02)
