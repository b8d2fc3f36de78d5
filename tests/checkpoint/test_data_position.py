"""Ranks of a resumed run continue together where the data was, also those that the saved run did not have."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler

import launcher
from launcher.compat.package import initialize

SAMPLES, STEPS, BATCH = 60, 4, 6


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


def train(rank: int, world_size: int, folder: str, resumes: bool) -> list[list[int]]:
    """Return the samples of this rank's steps: the first ones, or what is left of the epoch."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world_size,
        "steps_per_print": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 1},
    }
    engine, _, loader, _ = launcher.initialize(model=nn.Linear(1, 1), config=config, training_data=Numbers())
    if resumes:
        engine.load_checkpoint(folder)
    seen: list[Any] = []
    for batch in itertools.islice(loader, None if resumes else STEPS):
        engine.backward(engine(batch).square().mean())
        engine.step()
        seen.append(batch.flatten().int().tolist())
    if not resumes:
        engine.save_checkpoint(folder)
    engine.destroy()
    return seen


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_order_of_samples_goes_on(world_size: int, tmp_path: Path) -> None:
    run_on_ranks(2, train, str(tmp_path), False)
    by_rank = run_on_ranks(world_size, train, str(tmp_path), True)
    order = list(DistributedSampler(Numbers(), num_replicas=1, rank=0))
    assert {len(steps) for steps in by_rank} == {SAMPLES // BATCH - STEPS}
    seen = [sample for step in zip(*by_rank, strict=True) for row in zip(*step, strict=True) for sample in row]
    assert seen == order[STEPS * BATCH :]


def _loads_as_deepspeed(rank: int, world_size: int, folder: str, exact: bool | None, resumes: bool) -> dict[str, bool]:
    """Return whether a loader continues, or begins anew, after a script for DeepSpeed has loaded a checkpoint."""
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world_size,
        "steps_per_print": 0,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "checkpoint": {} if exact is None else {"exact_resume": exact},
    }
    found = []
    for loads in (False, True):
        torch.manual_seed(5)
        engine, _, loader, _ = initialize(model=nn.Linear(1, 1), config=config, training_data=Numbers())
        torch.manual_seed(5)
        if loads and resumes:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("LAUNCH_RESUME", "auto")
                engine.resume(folder)
        elif loads:
            engine.load_checkpoint(folder)
        seen = []
        for batch in loader:
            seen.append(batch.flatten().int().tolist())
            engine.backward(engine(batch).square().mean())
            engine.step()
            if not loads and engine.global_steps == STEPS:
                engine.save_checkpoint(folder)
        found.append(seen)
        engine.destroy()
    whole, loaded = found
    return {"begins_anew": loaded == whole, "goes_on": loaded == whole[STEPS:]}


@pytest.mark.parametrize(
    ("exact", "resumes", "goes_on"),
    [(None, False, False), (True, False, True), (None, True, True), (False, True, False)],
)
def test_engines_of_deepspeed_leave_the_data_to_the_script(
    exact: bool | None, resumes: bool, goes_on: bool, tmp_path: Path
) -> None:
    for found in run_on_ranks(2, _loads_as_deepspeed, str(tmp_path), exact, resumes):
        assert (found["goes_on"], found["begins_anew"]) == (goes_on, not goes_on)
