"""Ranks that run into a real memory limit, and the ladder that leads the job past it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import scripts
from harness.launch.command import ROOT, Result, run_launch
from harness.launch.control_groups import memory_groups
from harness.launch.forked_ranks import in_forks
from harness.needs import need

_LIMIT_BYTES = 200 << 20
_LIMIT_OF_AN_ENGINE_BYTES = 1 << 30  # a rank with torch in it takes a quarter of it


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A cgroup with a limit."""
    with memory_groups(1, _LIMIT_BYTES) as groups:
        if not groups:
            need("no cgroup with a memory limit can be made here")
        yield groups[0]


def test_the_limit_and_what_was_held_are_told(memory_group: Path, tmp_path: Path) -> None:
    script = scripts.write(
        tmp_path,
        """
        import os, time
        if os.environ["RANK"] == "1":
            held = []
            while True:
                held.append(bytearray(b"x" * (10 << 20)))
        time.sleep(600)
        """,
    )
    enter = f'echo $$ > {memory_group}/cgroup.procs; exec "$@"'
    done = subprocess.run(
        ["sh", "-c", enter, "sh", sys.executable, "-m", "launcher", "--num_gpus", "2", str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 137, done.stderr
    assert "✗ rank 1" in done.stderr
    assert "killed by SIGKILL, out of memory" in done.stderr
    assert "the memory limit of the cgroup was reached, limit 200.0 MiB" in done.stderr
    assert "this rank held up to" in done.stderr
    page = (ROOT / "docs" / "guides.md").read_text()
    shown = done.stderr[done.stderr.index("  next  ") :].rstrip()
    assert 'offload_optimizer and offload_param with "device": "nvme" in place of "cpu"' in shown
    assert shown in page


# ---- the ladder ----


# A tensor of 64 KiB and more is a mapping of its own, so that what is free again counts no more.
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
# Sequences grow: activations of micro-batches of 2, of 1, of a recomputed block, are too much in turn, and at last what
# is left of them beside all states of the optimizer. At each length a checkpoint is there before the next.
GROWING = """
    import os, resource, sys, torch, launcher
    from torch import nn

    WIDTH, ROWS, LENGTHS = 512, 128, [1, 1, 3, 3, 6, 6, 20, 20]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            for _ in range(4):
                x = torch.sin(x * self.gate)
            return x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(16384, WIDTH) for _ in range(4))  # each a unit of its own
            self.blocks = nn.ModuleList(Block() for _ in range(16))

        def forward(self, index, length):
            x = sum(table(index) for table in self.tables).unsqueeze(1).expand(-1, ROWS * length, -1)
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    torch.manual_seed(0)
    model = Model()
    (torch.randn(8, 8, requires_grad=True) @ torch.randn(8, 8)).sum().backward()  # the thread of autograd is there
    if sys.argv[1] != "0":
        with open("/proc/self/status") as file:
            used_kib = next(int(line.split()[1]) for line in file if line.startswith("VmData"))
        limit = used_kib * 1024 + (int(sys.argv[1]) << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    config = {
        "train_micro_batch_size_per_gpu": 2, "steps_per_print": 0, "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "checkpoint": {"folder": "checkpoints", "save_every": 2, "keep_last": 1},
    }
    engine, _, loader, _ = launcher.initialize(model=model, config=config, training_data=list(range(1024)))
    batches = iter(loader)
    while engine.global_steps < len(LENGTHS):
        step, losses = engine.global_steps, []
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(next(batches), LENGTHS[step])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        print("LOSS", step, sum(losses) / len(losses), flush=True)
"""
_ROOM_MIB = 653
_RUNGS = (
    "micro-batch 2 → 1, accumulation 1 → 2",
    "the blocks of the model are recomputed in backward",
    "ZeRO stage 0 → 1",
)
_LAST = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "train_batch_size": None,
    "activation_checkpointing": {"blocks": True},
    "zero_optimization": {"stage": 1},
}


def losses_of(result: Result) -> dict[int, dict[int, float]]:
    """Return the loss of each step, by rank."""
    found: dict[int, dict[int, float]] = {0: {}, 1: {}}
    for rank, step, loss in re.findall(r"^\[(\d)\] LOSS (\d+) (\S+)$", result.out, re.MULTILINE):
        found[int(rank)][int(step)] = float(loss)
    return found


@pytest.mark.soak
def test_a_job_that_runs_out_of_memory_three_times_ends_as_if_it_had_not(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, GROWING)
    arguments = ("--num_gpus", "2", "--grace", "1")
    found = run_launch(tmp_path, *arguments, "--on-oom", "ladder", script, str(_ROOM_MIB), env=EXACT)
    assert found.code == 0, found.err
    assert re.findall(r"^rung \d of the ladder, (.*): launch ", found.err, re.MULTILINE) == list(_RUNGS)
    assert "DefaultCPUAllocator: can't allocate memory" in found.err
    assert [f"behind step {step}" in found.out for step in (2, 4, 6)] == [True] * 3
    report = json.loads(next(tmp_path.glob("runs/*/report.json")).read_text())
    assert [one["exit_code"] for one in report["tries"]] == [1, 1, 1, 0]
    (tmp_path / "from_the_start").mkdir()
    patch = {"LAUNCH_CONFIG_PATCH": json.dumps(_LAST)}
    expected = run_launch(tmp_path / "from_the_start", *arguments, script, "0", env=EXACT | patch)
    assert expected.code == 0, expected.err
    for rank, losses in losses_of(expected).items():
        assert losses_of(found)[rank] == pytest.approx(losses, rel=1e-5)
        assert len(losses) == 8


# As above, with what needs too much said by the script: from a step on the run must be on a rung.
NEEDING = """
    import torch, launcher

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    config = {
        "train_micro_batch_size_per_gpu": 6, "steps_per_print": 0, "bf16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "checkpoint": {"folder": "checkpoints", "save_every": 1, "keep_last": 1},
    }
    data = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
    engine, _, loader, _ = launcher.initialize(model=model, config=config, training_data=data)
    is_on_rung = {
        3: engine.gradient_accumulation_steps() >= 2,
        5: engine.gradient_accumulation_steps() == 6,
        7: "activation_checkpointing" in engine.config,
        9: engine.zero_optimization_stage() >= 1,
        11: engine.zero_optimization_stage() >= 2,
    }
    while engine.global_steps < 16:  # two epochs
        losses = []
        for x in loader:
            step = engine.global_steps
            if not all(is_on for first, is_on in is_on_rung.items() if step >= first):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if engine.global_steps > step:
                print("LOSS", step, sum(losses) / len(losses), flush=True)
                losses = []
"""


def test_each_rung_continues_where_the_last_one_ended(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, NEEDING)
    arguments = ("--num_gpus", "2", "--grace", "1")
    found = run_launch(tmp_path, *arguments, "--on-oom", "ladder", *in_forks(script))
    assert found.code == 0, found.err
    assert re.findall(r"^rung \d of the ladder, (.*): launch ", found.err, re.MULTILINE) == [
        "micro-batch 6 → 3, accumulation 1 → 2",
        "micro-batch 3 → 1, accumulation 2 → 6",
        *_RUNGS[1:],
        "ZeRO stage 1 → 2",
    ]
    (tmp_path / "from_the_start").mkdir()
    patch = json.dumps(_LAST | {"gradient_accumulation_steps": 6, "zero_optimization": {"stage": 2}})
    env = {"LAUNCH_CONFIG_PATCH": patch}
    expected = run_launch(tmp_path / "from_the_start", *arguments, *in_forks(script), env=env)
    assert expected.code == 0, expected.err
    for rank, losses in losses_of(expected).items():
        assert losses_of(found)[rank] == pytest.approx(losses, rel=1e-4)
        assert len(losses) >= 16


# Ends as a GPU does that has too little memory, at the second step.
ENDING = """
    import json, sys, torch, launcher

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    engine, *_ = launcher.initialize(model=model, config=config | json.loads(sys.argv[1]))
    size = engine.train_micro_batch_size_per_gpu() if len(sys.argv) > 2 else 2
    engine.backward(engine(torch.ones(size, 4)).sum())
    engine.step()
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
"""


def test_the_report_names_the_next_rung(tmp_path: Path) -> None:
    script = scripts.write(tmp_path, ENDING)
    result = run_launch(tmp_path, "--num_gpus", "2", "--grace", "1", *in_forks(script, "{}"))
    assert result.code == 1
    shown = result.err[result.err.index("  next  ") :].splitlines()
    assert shown == [
        "  next  the blocks of the model are recomputed in backward; costs: a third more computing: one more forward",
        '        {"activation_checkpointing": {"blocks": true}}',
        "        --on-oom ladder does that by itself, from the last checkpoint with the same batch",
        "  or    micro-batch 2 → 1, accumulation 1 → 2, once the script does this: take the batch size from"
        " engine.train_micro_batch_size_per_gpu()",
    ]
    (page,) = tmp_path.glob("runs/*/report.json")
    report = json.loads(page.read_text())
    assert report["failure"]["memory"] == "device"
    assert report["failure"]["engine"]["stage"] == 0
    assert report["advice"]["rung"]["patch"] == {"activation_checkpointing": {"blocks": True}}
    follows = run_launch(tmp_path, "--num_gpus", "2", "--grace", "1", *in_forks(script, "{}", "follows"))
    assert "  next  micro-batch 2 → 1, accumulation 1 → 2; costs:" in follows.err


def test_the_ladder_ends(tmp_path: Path) -> None:
    keys = {"zero_optimization": {"stage": 2}, "activation_checkpointing": {"blocks": True}}
    script = scripts.write(tmp_path, ENDING)
    arguments = ("--num_gpus", "2", "--grace", "1", "--on-oom", "ladder", "--max-restarts", "3")
    result = run_launch(tmp_path, *arguments, *in_forks(script, json.dumps(keys)))
    assert result.code == 1
    assert re.findall(r"^rung \d of the ladder, (.*): launch ", result.err, re.MULTILINE) == ["ZeRO stage 2 → 3"]
    assert "restart 1 of 3" not in result.err
    assert "  next  the ladder ends before the disk: that rung needs a local folder" in result.err


def test_a_kill_by_the_kernel_takes_the_next_rung(tmp_path: Path) -> None:
    """Host memory, on a machine without GPUs: the rungs are those of activations and of sharding."""
    script = scripts.write(
        tmp_path,
        """
        import torch, launcher
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
        engine, *_ = launcher.initialize(model=model, config=config)
        held = []
        while "activation_checkpointing" not in engine.config:
            held.append(bytearray(b"x" * (10 << 20)))
        """,
    )
    with memory_groups(1, _LIMIT_OF_AN_ENGINE_BYTES) as groups:
        if not groups:
            need("no cgroup with a memory limit can be made here")
        enter = f'echo $$ > {groups[0]}/cgroup.procs; exec "$@"'
        options = ["--num_gpus", "1", "--on-oom", "ladder"]
        done = subprocess.run(
            ["sh", "-c", enter, "sh", sys.executable, "-m", "launcher", *options, str(script)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    assert "killed by SIGKILL, out of memory" in done.stderr
    assert "the memory limit of the cgroup was reached, limit 1.0 GiB" in done.stderr
    assert "rung 1 of the ladder, the blocks of the model are recomputed in backward" in done.stderr


def test_without_an_engine_there_is_no_ladder(tmp_path: Path) -> None:
    result = run_launch(tmp_path, "--on-oom", "ladder", scripts.write(tmp_path, "raise MemoryError"))
    assert result.code == 1
    assert "! no ladder: the rank had built no engine of this package" in result.err
    assert "rung 1" not in result.err
