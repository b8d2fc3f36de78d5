"""A rehearsal says what a real run takes and does: the bytes of each phase, and the engine's collectives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.train import rehearsed
from harness.train.forked import run_ranks

from launcher.planner.rehearsal import PHASES_OF_STEP

TENSOR = {"tensor_parallel": {"autotp_size": 2}}
SEQUENCE = {"sequence_parallel_size": 2}
PIPELINE = {"pipeline": {"stages": 2}, "gradient_accumulation_steps": 4}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
# Each setting and mesh once, some in the soak; `benchmarks/rehearsal.py` measures all of them together.
QUICK = [
    ("mlp", 1, 0, "", "fp32", {}),
    ("gpt2", 2, 2, "", "fp32", {"gradient_clipping": 1.0}),
    ("llama", 2, 2, "optimizer", "bf16", {}),
    ("mixtral", 2, 3, "", "bf16", {}),
    ("llama", 4, 1, "", "bf16", TENSOR),
    ("llama", 4, 1, "", "fp32", PIPELINE),
]
SOAK = [
    ("mlp", 2, 1, "", "bf16", {}),
    ("convolutions", 2, 3, "", "fp32", {}),
    ("encoder", 4, 3, "", "bf16", {"gradient_accumulation_steps": 2}),
    ("mlp", 2, 3, "all", "bf16", {}),
    ("qwen3", 4, 2, "", "bf16", SEQUENCE),
    ("mixtral", 4, 1, "", "bf16", EXPERTS),
]
CASES = [
    pytest.param(*case, id="-".join([*map(str, case[:5]), *case[5]]), marks=marks)
    for cases, marks in ((QUICK, ()), (SOAK, pytest.mark.soak))
    for case in cases
]


@pytest.mark.parametrize(("name", "world_size", "stage", "offload", "precision", "keys"), CASES)
def test_bytes_and_collectives(
    tmp_path: Path, name: str, world_size: int, stage: int, offload: str, precision: str, keys: dict[str, Any]
) -> None:
    config = rehearsed.setting(stage, offload, precision, **keys)
    found, real = rehearsed.rehearse_and_follow(tmp_path, name, config, world_size)
    for phase in PHASES_OF_STEP:
        assert sum(found.peaks[phase].values()) == pytest.approx(sum(real.peaks[phase].values()), rel=0.02)
    assert found.host_bytes == real.host_bytes
    assert rehearsed.collectives_of(found) == rehearsed.collectives_of(real)
    assert world_size == 1 or len(rehearsed.collectives_of(real)) > 2


@pytest.mark.parametrize("name", ["llama", "convolutions"])
def test_what_is_counted_is_what_torch_allocates(tmp_path: Path, name: str) -> None:
    config = json.dumps(rehearsed.setting(0))
    result = run_ranks(tmp_path, 1, rehearsed.profile, name, config, preload=rehearsed.PRELOAD)
    assert result.code == 0, result.err
    found = json.loads(result.out.splitlines()[-1])
    assert found["counted"] == pytest.approx(found["allocated"], rel=0.02)
