"""The examples of docs/python_api.md run: on this machine, over a real sshd and in a real Slurm."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import ROOT
from harness.launch.slurm import LoopbackSlurm
from harness.launch.sshd import LoopbackSshd

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python_api.md").read_text(), re.DOTALL)
TRAIN = BLOCKS[0].partition("\n\nresults")[0]


def blocks(word: str) -> list[str]:
    """The examples that have this word in them."""
    return [block for block in BLOCKS if word in block]


def run(folder: Path, sources: list[str], env: dict[str, str]) -> str:
    scripts.write(folder, "print('script')", "train.py")
    program = scripts.write(folder, "\n".join(sources), "program.py")
    done = subprocess.run([sys.executable, program], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(folder), **more}


def test_examples_on_this_machine(tmp_path: Path) -> None:
    here = [block for block in BLOCKS if not re.search(r"node-a|Sbatch", block)]
    out = run(tmp_path, here, environment(tmp_path))
    assert "[0] rank 0 of 2\n" in out
    assert "[1] script\n" in out
    assert re.search(r"rank [01] on localhost: exit code 1, signal None\nTraceback .*ValueError", out, re.DOTALL)
    assert "[0] ValueError" not in out


@pytest.mark.cluster
def test_examples_on_other_hosts(sshd: LoopbackSshd, tmp_path: Path) -> None:
    # ssh looks for its config in the account's home, whatever HOME says
    config = f'options=launcher.Options(ssh_config="{sshd.ssh_config}"), hosts='
    found = [block.replace("node-a", "127.0.0.2").replace("node-b", "127.0.0.3") for block in blocks("node-a")]
    found = [block.replace("hosts=", config) for block in found]
    assert found
    out = run(tmp_path, [TRAIN, *found], environment(tmp_path))
    assert "[1 127.0.0.3] rank 1 of 2\n" in out


@pytest.mark.cluster
def test_examples_in_slurm(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    out = run(tmp_path, [TRAIN, *blocks("Sbatch")], environment(tmp_path) | slurm.env)
    assert re.match(r"\d+ [A-Z]+\n", out)
