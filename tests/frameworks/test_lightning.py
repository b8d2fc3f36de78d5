"""Scripts with Lightning's `Trainer` and with `Fabric`: losses are those of DDP, on CPUs, under `launch`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.launch.command import run_launch
from harness.launch.forked_ranks import in_forks
from harness.needs import need
from harness.scripts import write
from harness.train.hf_job import environment

pytestmark = pytest.mark.long  # the import of Lightning, and a dozen trainings
LIGHTNING = Path(sys.prefix) / "lightning"
NUM_RANKS = 2
STRATEGIES = ["trainer 1", "trainer 2", "trainer 2_offload", "trainer 3", "trainer 3_offload", "accumulation 3"]
STRATEGIES += ["fabric 1", "fabric 2", "fabric 3", "fabric 3_offload"]
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each case has returned, of each rank."""
    missing = f"Lightning is not installed in {LIGHTNING} (make test does it where it can be fetched)"
    need(None if (LIGHTNING / "lightning").is_dir() else missing)
    folder = tmp_path_factory.mktemp("lightning")
    script = write(folder, "from frameworks.lightning_cases import main\nmain()\n", "job.py")
    names = ["trainer ddp", "accumulation ddp", "fabric ddp", *STRATEGIES]
    words = in_forks(script, *names, preload="harness.train.lightning_imports")
    result = run_launch(folder, f"--num_gpus={NUM_RANKS}", *words, env=environment())
    assert result.code == 0, result.out + result.err
    return [json.loads((folder / f"cases_of_rank_{rank}.json").read_text()) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_script_trains_saves_and_continues_as_with_ddp(found: list[Found], name: str) -> None:
    for rank in found:
        expected = rank[f"{name.split()[0]} ddp"]
        for what, values in rank[name].items():
            assert values == pytest.approx(expected[what], rel=1e-5, abs=1e-6), what
