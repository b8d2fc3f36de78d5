"""The Trainer's example, with the arguments of the command that its first lines name."""

from __future__ import annotations

import re
from pathlib import Path

from harness.launch.command import ROOT
from harness.train.hf_job import run_with_transformers

COMMAND = (
    "launch --num_gpus 2 examples/hf_trainer.py --deepspeed examples/configs/hf_zero2.json"
    " --output_dir out --max_steps 20"
)


def test_its_loss_falls_and_its_model_is_saved(tmp_path: Path) -> None:
    script, *words = [ROOT / word if word.startswith("examples/") else word for word in COMMAND.split()[3:]]
    result = run_with_transformers(tmp_path, Path(script), *words)
    assert result.code == 0, result.err
    found = re.search(r"loss (\d\.\d+) -> (\d\.\d+), saved to out", result.out)
    assert found is not None, result.out
    first, last = map(float, found.groups())
    assert last < first - 0.5
    saved = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= saved
    assert COMMAND.partition(" --output_dir")[0] in (ROOT / "examples" / "hf_trainer.py").read_text()
