"""The notebook cell of docs/guides.md, in a process that no launcher has started."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness.child import run_python
from harness.launch.command import ROOT

REST = """
import sys
sys.path.insert(0, "TESTS")
from huggingface.trainer_cases import model_and_data

model, data = model_and_data()
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.train()
assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine" and trainer.model_wrapped.global_steps == 2
emulation.restore()
"""


@pytest.mark.soak
def test_the_cell_trains(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides.md").read_text()
    (cell,) = [
        block for block in re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "emulate" in block
    ]
    (first,) = re.findall(r"the first cell is `(.*?)`", page)
    code = first + "\n" + cell + REST.replace("TESTS", str(ROOT / "tests"))
    result = run_python(tmp_path, code, env={"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"})
    assert result.returncode == 0, result.stderr
