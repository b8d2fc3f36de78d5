"""A rehearsal says what a real run takes and does: the bytes of each phase, and the engine's collectives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.train import rehearsed
from harness.train.forked import run_ranks

from launcher.planner.rehearsal import PHASES_OF_STEP, RankRehearsal

# Each model once, each setting once and more; `benchmarks/rehearsal.py` measures all of them together.
CASES = [
    ("mlp", 1, 0, "", "fp32"), ("mlp", 2, 1, "", "bf16"), ("llama", 2, 3, "", "bf16"), ("gpt2", 2, 2, "", "fp32"),
    ("convolutions", 2, 3, "", "fp32"), ("encoder", 4, 3, "", "bf16"), ("llama", 2, 2, "optimizer", "bf16"),
    ("mlp", 2, 3, "all", "bf16"), ("mixtral", 2, 3, "", "bf16"), ("qwen3", 4, 2, "", "bf16"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "world_size", "stage", "offload", "precision"), CASES)
def test_bytes_and_collectives(
    tmp_path: Path, name: str, world_size: int, stage: int, offload: str, precision: str
) -> None:
    config = json.dumps(rehearsed.setting(stage, offload, precision))
    env = {"LAUNCH_REDUCE_GROUP": "shared"}  # as it is where there are GPUs
    real = run_ranks(tmp_path, world_size, rehearsed.follow, name, config, tmp_path, env=env, preload="transformers")
    assert real.code == 0, real.err
    last = world_size - 1
    arguments = (name, config, tmp_path, str(last), str(world_size))
    found = run_ranks(tmp_path, 0, rehearsed.rehearse, *arguments, env=env, preload="transformers")
    assert found.code == 0, found.err
    run, rehearsal = (rehearsed.read(tmp_path, kind, last) for kind in ("real", "rehearsed"))
    for phase in PHASES_OF_STEP:
        assert sum(rehearsal.peaks[phase].values()) == pytest.approx(sum(run.peaks[phase].values()), rel=0.02)
    assert rehearsal.host_bytes == run.host_bytes
    assert _of_engine(rehearsal) == _of_engine(run)
    assert world_size == 1 or len(_of_engine(run)) > 2


def _of_engine(found: RankRehearsal) -> list[tuple[str, str, int, str, str, int]]:
    return [
        (call.kind, found.groups[call.group].purpose, call.num_bytes, call.what, call.phase, call.step)
        for call in found.calls
        if call.is_of_engine
    ]
