"""No legal order of a GPU's streams changes a result: every stage, precision and place, in the model of streams."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.parity import Case, Trajectory, make_model, micro_batches
from harness.ranks import run_on_ranks
from harness.streams import modelled_streams, reference_kernels
from harness.collective import communicators

import launcher

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_STEPS = 3
HOST = {"device": "cpu"}
SHARDED = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def _disk(folder: str, **more: Any) -> dict[str, Any]:
    return {"device": "nvme", "nvme_path": folder, **more}


PLACES: dict[str, Any] = {
    "device": lambda folder: {},
    "optimizer on host": lambda folder: {"offload_optimizer": HOST},
    "parameters on host": lambda folder: {"offload_param": HOST},
    "both on host": lambda folder: {"offload_optimizer": HOST, "offload_param": HOST},
    "both on disk": lambda folder: {"offload_optimizer": _disk(folder), "offload_param": _disk(folder, max_in_cpu=0)},
    "parameters on disk": lambda folder: {"offload_param": _disk(folder, max_in_cpu=0)},
}


def _train(rank: int, world_size: int, case: Case, *, is_modelled: bool) -> Trajectory:
    """Train with NCCL's communicator; on request in the model of streams."""
    with contextlib.ExitStack() as stack:
        model = None
        if is_modelled:
            model = stack.enter_context(modelled_streams())
        else:
            stack.enter_context(communicators("nccl"))
            stack.enter_context(reference_kernels())
        engine = launcher.initialize(model=make_model(case), config=case.config(world_size))[0]
        part = slice(rank * case.batch // world_size, (rank + 1) * case.batch // world_size)
        losses = []
        with model if model is not None else contextlib.nullcontext():
            for step in micro_batches(case):
                for tokens, targets in step:
                    loss = engine(tokens[part], targets[part])
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.item())
        weights = engine.state_dict()
        engine.destroy()
    return Trajectory(losses, weights, [])


def _both(rank: int, world_size: int, case: Case) -> bool:
    found, expected = (_train(rank, world_size, case, is_modelled=is_modelled) for is_modelled in (True, False))
    same = all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())
    return same and found.losses == expected.losses


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("stage", "place"),
    [
        (stage, place)
        for stage in (0, 1, 2, 3)
        for place in PLACES
        if place == "device" or (stage and place == "optimizer on host") or stage == 3
    ],
)
def test_nothing_races(stage: int, place: str, precision: str, accumulation: int, tmp_path: Path) -> None:
    zero = {**SHARDED, **PLACES[place](str(tmp_path))}
    case = Case(stage, precision, accumulation, num_steps=NUM_STEPS, unit_numel=2500, zero=zero, unused=True)
    assert run_on_ranks(2, _both, case) == [True, True]
