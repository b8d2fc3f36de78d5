"""Disks that are full, fail or are shared, under real jobs: the job ends with the path, and nothing stays behind."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import disks, scripts
from harness.launch.command import Launch
from harness.launch.control_groups import memory_groups
from harness.launch.forked_ranks import in_forks
from harness.needs import need
from harness.train.forked import run_ranks

SCRIPT = """
    import os, resource, signal, sys
    from pathlib import Path
    import torch
    from torch import nn
    import launcher

    folder, what, rank = sys.argv[1], sys.argv[2], int(os.environ["RANK"])
    WIDTH, LAYERS = 256, 4

    def open_files():
        entries = [(entry, os.path.realpath(entry)) for entry in Path("/proc/self/fd").iterdir()]
        return [entry for entry, target in entries if target.startswith(folder)]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

        def forward(self, x):
            for layer in self.layers:
                x = x + 0.1 * torch.tanh(layer(x))
            return x.square().mean()

    there = {"device": "nvme", "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "offload_optimizer": {**there, "pipeline_read": True, "pipeline_write": True},
            "offload_param": {**there, "max_in_cpu": 0},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    torch.manual_seed(0)
    engine = launcher.initialize(model=Model(), config=config)[0]
    x = torch.ones(1, WIDTH)
    for step in range(3):
        if step == 1 and rank == 1:
            if what == "write in backward":
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        loss = engine(x)
        if step == 1 and rank == 1 and what == "read in backward":
            for entry in open_files():
                os.truncate(entry, 0)
        engine.backward(loss)
        if step == 1 and rank == 1 and what == "write in step":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        if step == 1 and rank == 1 and what == "read in step":
            for entry in open_files():
                os.truncate(entry, 0)
        engine.step()
        print("LOSS", step, rank, loss.item())
"""
NUM_LAYERS, WIDTH = 4, 256


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 16 MiB."""
    with disks.small_disk(tmp_path / "disk", "16m") as folder:
        yield folder


def losses_of(out: str) -> list[str]:
    return sorted(line.partition("LOSS ")[2] for line in out.splitlines() if "LOSS " in line)


def test_two_jobs_on_one_folder_leave_nothing_there(tmp_path: Path, disk: Path) -> None:
    before, found = free_bytes(disk), []
    script = scripts.write(tmp_path, SCRIPT)
    jobs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        jobs.append(Launch(tmp_path / name, "--num_gpus", "1", *in_forks(script, disk, "train")))
    for job in jobs:
        result = job.wait()
        assert result.code == 0, result.err
        assert "disk: " + str(disk) in result.out
        found.append(losses_of(result.out))
    assert len(found[0]) == 3
    assert found[0] == found[1]
    assert (list(disk.iterdir()), free_bytes(disk)) == ([], before)


def test_a_disk_that_is_too_full_ends_the_job_before_the_first_step(tmp_path: Path, disk: Path) -> None:
    # Master, gradient, two states and the room for them: 4 MiB for two ranks. Half of that is left.
    (disk / "other").write_bytes(bytes(free_bytes(disk) - NUM_LAYERS * WIDTH * WIDTH * 8))
    result = run_ranks(tmp_path, 2, scripts.write(tmp_path, SCRIPT), str(disk), "train")
    assert result.code == 1
    assert f"{disk}: " in result.err
    assert re.search(r"cannot be (reserved|created): No space left on device; .* are free there; make room", result.err)
    assert losses_of(result.out) == []
    assert [entry.name for entry in disk.iterdir()] == ["other"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("write in backward", "could not be written: File too large"),
        pytest.param("read in backward", "could not be read: ", marks=pytest.mark.soak),
        pytest.param("write in step", "could not be written: File too large", marks=pytest.mark.soak),
        ("read in step", "could not be read: "),
    ],
)
def test_a_disk_that_fails_ends_the_job_with_its_path(tmp_path: Path, what: str, message: str) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    script = scripts.write(tmp_path, SCRIPT)
    result = Launch(tmp_path, "--num_gpus", "2", *in_forks(script, folder, what)).wait()
    assert result.code == 1
    assert "rank 1" in result.err
    assert f"{folder}: " in result.err
    assert message in result.err
    assert "are free there; " in result.err
    assert [line.split()[:2] for line in losses_of(result.out) if " 1 " in line] == [["0", "1"]]
    assert list(folder.iterdir()) == []


def test_nothing_is_left_of_a_rank_that_is_killed(tmp_path: Path, disk: Path) -> None:
    before = free_bytes(disk)
    result = run_ranks(tmp_path, 2, scripts.write(tmp_path, SCRIPT), str(disk), "kill")
    assert result.code == 137
    assert (list(disk.iterdir()), free_bytes(disk)) == ([], before)


# ---- more than memory holds ----

LIMIT_BYTES = 128 << 20
STATES_BYTES = 4 * LIMIT_BYTES
LARGE = 1024  # width

LARGE_SCRIPT = """
    import os, sys
    from pathlib import Path
    import torch
    from torch import nn
    import launcher

    folder, device, group, width, layers = *sys.argv[1:4], *map(int, sys.argv[4:])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

        def forward(self, x):
            for layer in self.layers:
                x = x + 0.1 * torch.tanh(layer(x))
            return x.float().square().mean()

    there = {"device": device, "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": width * width,
            "offload_optimizer": {**there, "pipeline_read": True, "pipeline_write": True},
            "offload_param": {**there, "max_in_cpu": 0},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    launcher.initialize(model=nn.Linear(1, 1), config=config)
    Path(group, "cgroup.procs").write_text(str(os.getpid()))  # what has been loaded so far is not counted
    with launcher.zero.Init(config_dict_or_path=config):
        model = Model()
    engine = launcher.initialize(model=model, config=config)[0]
    x, losses = torch.ones(1, width, dtype=torch.bfloat16), []
    for _ in range(2):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    states = engine.optimizer.flat.state_numel() * 4
    print("STATES", states, "LOSSES", *losses)
    assert losses[-1] < losses[0]
"""


@pytest.mark.parametrize(
    "device", [pytest.param("nvme", marks=pytest.mark.long), pytest.param("cpu", marks=pytest.mark.soak)]
)
def test_states_four_times_as_large_as_the_memory(tmp_path: Path, device: str) -> None:
    script, num_layers = scripts.write(tmp_path, LARGE_SCRIPT), STATES_BYTES // (LARGE * LARGE * 8)
    with memory_groups(1, LIMIT_BYTES) as groups:
        if not groups:
            need("no control group with a memory limit can be made here")
        exact = ("--env", "MALLOC_MMAP_THRESHOLD_=1048576")
        arguments = (*exact, "--num_gpus", "1", script, tmp_path, device, groups[0], str(LARGE), str(num_layers))
        result = Launch(tmp_path, *arguments).wait()
    if device == "cpu":
        assert result.code == 137, "in host memory they do not fit"
        return
    assert result.code == 0, result.err
    assert f"STATES {STATES_BYTES}" in result.out
