"""A Trainer script as it is on a user's disk, from the command line: `launch`, torchrun, plain python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.launch.command import DEADLINE_S, run_launch
from harness.launch.forked_ranks import in_forks
from harness.train.hf_job import IMPORTS, environment
from huggingface.trainer_cases import ADAMW, WARMUP_DECAY_LR, config_of

SCRIPT = Path(__file__).with_name("train_script.py")
ARGUMENTS = ["--output_dir=out", "--max_steps=3", "--logging_steps=1", "--report_to=none", "--save_strategy=no"]
ARGUMENTS += ["--per_device_train_batch_size=2", "--learning_rate=1e-2", "--gradient_accumulation_steps=2"]

# What transformers, accelerate and torch print of their own accord, with what follows on its line.
OF_OTHERS = (
    r"\{'(loss|train_runtime)': .*",  # the Trainer's log
    r"\[RANK 0\] Gradient accumulation steps mismatch: .*",  # accelerate's: always, under the Trainer
    r".*UserWarning: 'pin_memory' argument is set as true but no accelerator is found.*",
    r"  super\(\).__init__\(loader\)",
)
OF_THE_LAUNCHER = (
    "no GPU here: the ranks run on the CPU",
    r"launch \S+ · job \S+ · 1 host × \d ranks? = world \d · 127.0.0.1:\d+ · logs runs/\S+/",
)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config that has no section which names a precision."""
    content = config_of(2, optimizer=ADAMW, scheduler=WARMUP_DECAY_LR)
    del content["fp16"], content["bf16"]
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(content, indent=2))
    return path


@pytest.mark.parametrize(("world_size", "is_forked"), [pytest.param(1, False, marks=pytest.mark.long), (2, True)])
def test_launch_runs_a_script_with_its_config_and_adds_nothing_to_what_it_prints(
    world_size: int, is_forked: bool, tmp_path: Path, config: Path
) -> None:
    """A rank with its imports, which take many seconds, and two that have them."""
    command: list[str | Path] = [SCRIPT, "--deepspeed", config.name, *ARGUMENTS]
    if is_forked:
        command = in_forks(*command, preload=IMPORTS)
    result = run_launch(tmp_path, "--num_gpus", str(world_size), *command, env=environment())
    assert result.code == 0, result.err
    facts, *losses = (tmp_path / "out" / "told.txt").read_text().splitlines()
    assert facts == f"launcher.engine.deepspeed_engine {world_size} 2"
    assert len(losses) == 3
    lines = [line for line in re.split(r"[\n\r]+", result.out + result.err) if line.strip()]
    bars = [line for line in lines if "it/s]" in line or "s/it]" in line]
    assert any(re.fullmatch(r"\[0\] 100%\|█+\| 3/3 .*", line) for line in bars)
    told = [re.sub(r"^\[[01]\] ?", "", line) for line in lines if line not in bars]
    ours = [line for line in told if line.strip() and not any(re.fullmatch(other, line) for other in OF_OTHERS)]
    trained = [line for line in ours if re.fullmatch(r"3 steps · .* · goodput \d+%", line)]
    assert len(trained) == (not is_forked), "forks have no journal"
    ours = [line for line in ours if line not in trained]
    assert len(ours) == 2
    for line, expected in zip(sorted(ours), sorted(OF_THE_LAUNCHER), strict=True):
        assert re.fullmatch(expected, line)


def told(folder: Path, config: Path, env: dict[str, str]) -> list[float]:
    """Return the losses that the script leaves, of 2 ranks in a folder."""
    folder.mkdir()
    command = in_forks(SCRIPT, "--deepspeed", str(config), *ARGUMENTS, preload=IMPORTS)
    result = run_launch(folder, "--num_gpus", "2", *command, env=environment() | env)
    assert result.code == 0, result.err
    facts, *losses = (folder / "out" / "told.txt").read_text().splitlines()
    assert facts == f"launcher.engine.deepspeed_engine 2 {3 if env else 2}"
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("is_fixed", [True, False])
def test_the_arguments_follow_a_patch_of_the_config(tmp_path: Path, config: Path, is_fixed: bool) -> None:
    """As after an end for lack of memory. is_fixed: the config names sizes, which the Trainer compares with its own."""
    if is_fixed:
        sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "train_batch_size": 8}
        config.write_text(json.dumps(json.loads(config.read_text()) | sizes))
    patch = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "train_batch_size": None,
        "activation_checkpointing": {"blocks": True}, "zero_optimization": {"stage": 3},
    }  # fmt: skip
    expected = told(tmp_path / "before", config, {})
    found = told(tmp_path / "after", config, {"LAUNCH_CONFIG_PATCH": json.dumps(patch)})
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("start", "world_size"), [([], 1), (["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"], 2)]
)
def test_python_and_torchrun_run_a_script_with_the_one_line(
    start: list[str], world_size: int, tmp_path: Path, config: Path
) -> None:
    command = [sys.executable, *start, str(SCRIPT), "--deepspeed", config.name, *ARGUMENTS]
    env = {**os.environ, **environment(), "INSTALL": "1"}
    with (tmp_path / "all.txt").open("w+") as output:
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(DEADLINE_S)
        finally:
            process.terminate()  # torchrun ends its ranks then
            process.wait()
    assert code == 0, (tmp_path / "all.txt").read_text()
    facts, *losses = (tmp_path / "out" / "told.txt").read_text().splitlines()
    assert facts == f"launcher.engine.deepspeed_engine {world_size} 2"
    assert len(losses) == 3
