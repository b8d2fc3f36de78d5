"""An import holds one parameter in memory, whatever the size of the checkpoint."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from launcher.checkpoint.convert.to_ours import import_deepspeed
from launcher.checkpoint.formats.native import NativeSource

NUM_PARAMS, NUMEL = 4, 6_000_000  # 24 MB each in fp32, and two states as large


def memory_bytes(key: str) -> int:
    """Return VmRSS, or VmHWM: the most since it was reset."""
    return 1024 * int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def _save(folder: Path) -> None:
    """Write 288 MB as DeepSpeed does at stage 2 on one rank."""
    (folder / "tag").mkdir(parents=True)
    (folder / "latest").write_text("tag")
    names = [f"layers.{index}" for index in range(NUM_PARAMS)]
    model = {
        "module": {name: torch.zeros(1, dtype=torch.bfloat16).expand(NUMEL) for name in names},
        "buffer_names": [],
        "param_shapes": [{name: torch.Size([NUMEL]) for name in names}],
        "shared_params": {},
        "global_steps": 7,
        "ds_config": {},
        "ds_version": "0.19.8",
    }
    torch.save(model, folder / "tag" / "mp_rank_00_model_states.pt")
    flat = torch.arange(NUM_PARAMS * NUMEL, dtype=torch.float32)
    zero = {
        "partition_count": [1],
        "single_partition_of_fp32_groups": [flat],
        "base_optimizer_state": {
            "state": {0: {"step": torch.tensor(7.0), "exp_avg": flat * 2, "exp_avg_sq": flat * 4}},
            "param_groups": [{"params": [0], "lr": 0.1}],
        },
    }
    torch.save({"optimizer_state_dict": zero}, folder / "tag" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")


def test_an_import_takes_the_memory_of_its_largest_parameter(tmp_path: Path) -> None:
    _save(tmp_path / "saved")
    gc.collect()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    except OSError as error:
        pytest.skip(f"the peak of memory cannot be reset: {error}")
    before = memory_bytes("VmRSS")

    path = import_deepspeed(tmp_path / "saved", tmp_path / "target")

    peak = memory_bytes("VmHWM") - before
    assert peak < 2 * 4 * NUMEL, peak  # what is imported and pages of the mapped file are less than a second one
    out = torch.empty(3)
    NativeSource(path).read("exp_avg", f"layers.{NUM_PARAMS - 1}", NUMEL - 3, out)
    expected = torch.arange(NUM_PARAMS * NUMEL - 3, NUM_PARAMS * NUMEL, dtype=torch.float32) * 2
    assert out.equal(expected)
