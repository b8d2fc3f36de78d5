"""Jobs of several parts in a real Slurm: refused with one error, wherever `launch` stands."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import ROOT
from harness.launch.slurm import LoopbackSlurm

pytestmark = pytest.mark.cluster
LAUNCH = (sys.executable, "-m", "launcher")
REFUSED = "✗ SLURM_HET_SIZE: this Slurm job is heterogeneous: its 2 parts have their own nodes and GPUs each"


@pytest.mark.parametrize("words", [("script.py",), ("exec", "true")], ids=["run", "exec"])
def test_a_job_of_salloc_is_refused(slurm: LoopbackSlurm, tmp_path: Path, words: tuple[str, ...]) -> None:
    scripts.write(tmp_path, "open('ran', 'w')")
    result = subprocess.run(
        ["salloc", "-N1", "--gres=gpu:1", ":", "-N1", "--gres=gpu:2", *LAUNCH, *words],
        cwd=tmp_path,
        env={**slurm.env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 2, result.stderr
    assert result.stderr.count(REFUSED) == 1
    assert not (tmp_path / "ran").exists()


def test_a_batch_job_is_refused(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    scripts.write(tmp_path, "open('ran', 'w')")
    job = tmp_path / "job.sh"
    command = shlex.join([*LAUNCH, "script.py"])
    job.write_text(
        "#!/bin/bash\n#SBATCH -N1 --output=out.txt\n#SBATCH hetjob\n#SBATCH -N1\n"
        f"export PYTHONPATH={ROOT}\ncd {shlex.quote(str(tmp_path))}\n{command}\n"
    )
    assert slurm.run_batch(job, cwd=tmp_path) == 2
    assert REFUSED in (tmp_path / "out.txt").read_text()
    assert not (tmp_path / "ran").exists()
