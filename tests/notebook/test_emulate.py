"""`emulate()`: what it sets, that all of it is undone, and what it refuses."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import launcher
from launcher.base import env
from launcher.base.errors import UsageError

NAMES = [variable.name for variable in env.ALL if variable.direction == "set"]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    yield
    monkeypatch.delenv("LAUNCH_JOB_ID", raising=False)
    launcher.notebook.emulate().restore()


def test_the_block_is_rank_0_of_1_and_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "what was here")
    monkeypatch.setenv("MASTER_PORT", "")
    before = dict(os.environ)
    with launcher.notebook.emulate():
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
            assert os.environ[name] == value
        assert os.environ["MASTER_ADDR"] == "127.0.0.1"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == before.get("CUDA_VISIBLE_DEVICES")
        os.environ["WORLD_SIZE"] = "5"
    assert dict(os.environ) == before


def test_it_is_undone_when_the_block_raises() -> None:
    before = dict(os.environ)
    with pytest.raises(ValueError, match="mine"), launcher.notebook.emulate():
        raise ValueError("mine")
    assert dict(os.environ) == before


def test_a_plain_call_holds_until_restore() -> None:
    before = dict(os.environ)
    emulation = launcher.notebook.emulate()
    assert os.environ["RANK"] == "0"
    emulation.restore()
    assert dict(os.environ) == before
    emulation.restore()
    assert dict(os.environ) == before


def test_a_cell_that_runs_twice_changes_nothing_and_its_last_handle_restores() -> None:
    before = dict(os.environ)
    launcher.notebook.emulate()
    during = dict(os.environ)
    second = launcher.notebook.emulate()
    assert dict(os.environ) == during
    second.restore()
    assert dict(os.environ) == before


def test_a_block_inside_an_emulation_does_not_end_it() -> None:
    outer = launcher.notebook.emulate()
    during = dict(os.environ)
    with launcher.notebook.emulate():
        assert dict(os.environ) == during
    assert dict(os.environ) == during
    outer.restore()
    assert "RANK" not in os.environ


def test_an_old_handle_does_not_end_a_new_emulation() -> None:
    old = launcher.notebook.emulate()
    old.restore()
    with launcher.notebook.emulate():
        old.restore()
        assert os.environ["RANK"] == "0"


def test_the_engine_trains_and_its_process_group_ends_with_the_block() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
    }
    for _ in range(2):  # the second group gets a port of its own
        with launcher.notebook.emulate():
            model = torch.nn.Linear(3, 1)
            before = model.weight.detach().clone()
            engine, *_ = launcher.initialize(model=model, config=config)
            assert dist.is_initialized()
            engine.backward(engine(torch.ones(2, 3, device=engine.device)).mean())
            engine.step()
            engine.synchronize_parameters()
            assert not torch.equal(model.weight.detach().cpu(), before)
        assert not dist.is_initialized()


def test_a_process_group_from_before_stays() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with launcher.notebook.emulate():
            assert dist.is_initialized()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("num_gpus", [2, 0, 8])
def test_more_than_one_rank_is_refused_with_reason_and_alternative(num_gpus: int) -> None:
    before = dict(os.environ)
    with pytest.raises(UsageError, match=rf"cannot make {num_gpus} ranks: .*process of its own.*notebook\.run\(fn"):
        launcher.notebook.emulate(num_gpus=num_gpus)
    assert dict(os.environ) == before


def test_a_rank_of_a_real_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LAUNCH_JOB_ID": "calm-otter-4f2a", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="this process is rank 1 of a job of 2"):
        launcher.notebook.emulate()
    assert os.environ["RANK"] == "1"
