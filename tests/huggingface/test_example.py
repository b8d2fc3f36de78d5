"""The Trainer's example, by the command that its first lines name."""

from __future__ import annotations

import re
from pathlib import Path

from harness.launching import ROOT, run_launch

EXAMPLE = ROOT / "examples" / "hf_trainer.py"


def test_its_loss_falls_and_its_model_is_saved(tmp_path: Path) -> None:
    options = ("--deepspeed", str(ROOT / "examples/configs/hf_zero2.json"), "--output_dir", "out", "--max_steps", "20")
    env = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    result = run_launch(tmp_path, "--num_gpus", "2", str(EXAMPLE), *options, env=env)
    assert result.code == 0, result.err
    found = re.search(r"loss (\d\.\d+) -> (\d\.\d+), saved to out", result.out)
    assert found is not None, result.out
    first, last = map(float, found.groups())
    assert last < first - 0.5
    saved = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= saved
    assert (
        "launch --num_gpus 2 examples/hf_trainer.py --deepspeed examples/configs/hf_zero2.json" in EXAMPLE.read_text()
    )
