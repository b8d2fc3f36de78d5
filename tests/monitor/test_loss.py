"""The loss that the panel shows: told about once a second, by one rank, without a wait."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from launcher.base import env, progress
from launcher.monitor.meters import INTERVAL_S, LossReporter


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(progress, "_shared", None)
    path = str(tmp_path / "progress")
    monkeypatch.setenv(env.PROGRESS_FILE.name, path)
    descriptor = progress.make_counter(path)
    yield descriptor
    os.close(descriptor)


def test_the_mean_of_a_step_is_told_at_most_once_in_an_interval(record: int) -> None:
    now_s = 5.0
    teller = LossReporter(is_wanted=True, clock=lambda: now_s)
    teller.step([torch.tensor(1.0), torch.tensor(2.0, dtype=torch.bfloat16)])
    assert progress.read_counter(record).loss == 1.5
    teller.step([torch.tensor(9.0)])
    assert progress.read_counter(record).loss == 1.5
    now_s += INTERVAL_S
    teller.step([])  # a step without a loss that it knows of
    teller.step([torch.tensor(0.25)])
    assert progress.read_counter(record).loss == 0.25


def test_only_the_rank_that_is_shown_tells(record: int) -> None:
    LossReporter(is_wanted=False).step([torch.tensor(1.0)])
    assert progress.read_counter(record).loss is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_no_step_waits_for_the_device(record: int) -> None:
    now_s = 5.0
    teller = LossReporter(is_wanted=True, clock=lambda: now_s)
    loss = torch.tensor(3.0, device="cuda")
    torch.empty((), pin_memory=True)  # the first one sets up the allocator of pinned memory
    torch.cuda._sleep(1_000_000_000)  # cycles: the device is busy for about half a second
    started_s = time.monotonic()
    teller.step([loss])
    teller.step([loss])
    assert time.monotonic() - started_s < 0.2
    assert progress.read_counter(record).loss is None
    torch.cuda.synchronize()
    teller.step([loss])
    assert progress.read_counter(record).loss == 3.0
