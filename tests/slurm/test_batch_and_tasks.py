"""`launch` in a batch script, and under `srun launch` with one task for each rank; a real Slurm."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import ROOT
from harness.launch.forked_ranks import in_forks
from harness.launch.slurm import LoopbackSlurm
from harness.train import hf_job

pytestmark = pytest.mark.cluster
LAUNCH = (sys.executable, "-m", "launcher")


def submit(slurm: LoopbackSlurm, folder: Path, body: str, *options: str) -> tuple[int, str]:
    """Run a batch script to its end; returns its exit code and what it wrote."""
    script = scripts.write(folder, "", "job.sh")
    script.write_text(f"#!/bin/bash\ncd {shlex.quote(str(folder))}\nexport PYTHONPATH={ROOT}\n{body}\n")
    code = slurm.run_batch("--output=out.txt", *options, script, cwd=folder)
    return code, (folder / "out.txt").read_text(errors="replace")


def tasks(slurm: LoopbackSlurm, folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `srun OPTIONS launch ...` on three nodes, two tasks each."""
    return subprocess.run(
        ["srun", "--nodes=3", "--ntasks-per-node=2", "--gres=gpu:2", *LAUNCH, *map(str, words)],
        cwd=folder,
        env={**slurm.env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def environments(out: str) -> list[dict[str, str]]:
    found = [json.loads(text) for text in re.findall(r"ENV (\{.*\})$", out, re.MULTILINE)]
    return sorted(found, key=lambda environment: int(environment["RANK"]))


@pytest.mark.long
def test_the_example_with_the_trainer_runs_on_two_nodes(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    # The script's `launch`, with the address of rank 0: the nodes' names do not resolve here.
    words = [*LAUNCH, "--master_addr", "127.0.0.1", *in_forks(preload=hf_job.IMPORTS)]
    command = scripts.write(tmp_path, "", "launch")
    command.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, words))} "$@"\n')
    command.chmod(0o755)
    smaller = ["--gres=gpu:1", "--cpus-per-task=1", "--time=5", f"--output={tmp_path / 'out.txt'}", f"--chdir={ROOT}"]
    options = ["--max_steps", "2", "--logging_steps", "1", "--output_dir", str(tmp_path / "model")]
    variables = {"PATH": f"{tmp_path}:{slurm.env['PATH']}", "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        ["sbatch", "--wait", *smaller, ROOT / "examples" / "hf_trainer.slurm", *options],
        env={**slurm.env, **variables, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    said = (tmp_path / "out.txt").read_text(errors="replace")
    assert result.returncode == 0, said
    assert re.search(r"loss \d\.\d+ -> \d\.\d+, saved to", said) is not None, said
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_batch_script_uses_all_its_nodes(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    scripts.write(tmp_path, scripts.ENVIRONMENT)
    options = ("--nodes=3", "--ntasks-per-node=1", "--gres=gpu:2")
    code, out = submit(slurm, tmp_path, shlex.join([*LAUNCH, "script.py"]), *options)
    assert code == 0, out
    assert [environment["RANK"] for environment in environments(out)] == list("012345")


def test_the_code_of_a_failing_rank_is_the_batch_script_s(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    scripts.write(tmp_path, scripts.BIPOLAR)
    options = ("--nodes=2", "--ntasks-per-node=1", "--gres=gpu:1")
    code, out = submit(slurm, tmp_path, shlex.join([*LAUNCH, "script.py", "exit"]), *options)
    assert code == 3, out
    assert "✗ rank 1 (n2, pid " in out


def test_one_task_of_srun_is_one_rank(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    result = tasks(slurm, tmp_path, scripts.write(tmp_path, scripts.ENVIRONMENT), "a b")
    assert result.returncode == 0, result.stderr
    found = environments(result.stdout)
    assert [environment["RANK"] for environment in found] == list("012345")
    assert [environment["NODE_RANK"] for environment in found] == list("001122")
    assert [environment["LOCAL_RANK"] for environment in found] == list("010101")
    assert {environment["WORLD_SIZE"] for environment in found} == {"6"}
    assert {environment["MASTER_ADDR"] for environment in found} == {"n1"}
    assert len({environment["MASTER_PORT"] for environment in found}) == 1
    assert result.stdout.count('ARGV ["a b"]') == 6
    assert result.stderr.count("rank 0 of 6 (one for each task of srun)") == 1


def test_a_task_shows_its_traceback_and_srun_its_code(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    script = scripts.write(tmp_path, "import os, sys\nif os.environ['RANK'] == '1': sys.exit(3)\n")
    assert tasks(slurm, tmp_path, script).returncode == 3
    result = tasks(slurm, tmp_path, scripts.write(tmp_path, "raise ValueError('the data is bad')"))
    assert result.returncode == 1
    assert result.stderr.count("ValueError: the data is bad") == 6


def test_options_of_a_launcher_are_refused_in_a_task(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    result = tasks(slurm, tmp_path, "--log-dir", "logs", scripts.write(tmp_path, "print('never')"))
    assert result.returncode == 2
    assert result.stderr.count("--log-dir has no meaning here: srun has started 6 tasks, and each is one rank") == 1
    assert "never" not in result.stdout


def test_a_dry_run_of_a_task_starts_nothing(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    options = ("--dry-run", "--json", "--resume", "auto")
    result = tasks(slurm, tmp_path, *options, scripts.write(tmp_path, "print('never')"))
    assert result.returncode == 0, result.stderr
    variables = [json.loads(line) for line in result.stdout.splitlines()]
    assert sorted(rank["RANK"] for rank in variables) == list("012345")
    assert {rank["LAUNCH_RESUME"] for rank in variables} == {"auto"}


def test_a_shell_inside_a_step_uses_the_whole_allocation(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    """`salloc`, then `srun --pty bash`: one task on one node, from which all nodes of the job are used."""
    scripts.write(tmp_path, scripts.ENVIRONMENT)
    command = shlex.join([*LAUNCH, "--num_gpus", "2", "script.py"])
    body = f"export PYTHONPATH={ROOT}\nsrun --nodes=1 --ntasks=1 bash -c {shlex.quote(command)}"
    code, out = submit(slurm, tmp_path, body, "--nodes=3", "--ntasks-per-node=1", "--job-name=mine")
    assert code == 0, out
    assert [environment["RANK"] for environment in environments(out)] == list("012345")


def test_tasks_of_srun_that_run_the_script_itself_are_one_world(slurm: LoopbackSlurm, tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import os, torch, launcher
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # the nodes' names do not resolve here
        launcher.init_distributed()
        total = torch.tensor([torch.distributed.get_rank() + 1])
        torch.distributed.all_reduce(total)
        print("TOTAL", int(total), "LOCAL", os.environ["LOCAL_RANK"])
        """,
    )
    _, variable, in_fork = map(str, in_forks(preload=hf_job.IMPORTS))
    result = subprocess.run(
        ["srun", "--nodes=1", "--ntasks=2", f"--export=ALL,{variable}", sys.executable, in_fork, script],
        cwd=tmp_path,
        env={**slurm.env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert sorted(result.stdout.splitlines()) == ["TOTAL 3 LOCAL 0", "TOTAL 3 LOCAL 1"], result.stderr
