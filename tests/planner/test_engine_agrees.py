"""What the planner says is what the engine keeps: real ranks, real buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.offload import is_in_host_memory, late_link
from harness.ranks import run_on_ranks
from torch import nn

from launcher.planner.memory import Offload, Precision, Setting, rank_memory
from launcher.planner.model import ModelFacts, Parameter

WIDTH, NUM_BLOCKS, WORLD_SIZE = 600, 8, 2


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS)))


def facts() -> ModelFacts:
    params = tuple(Parameter(name, param.numel()) for name, param in build().named_parameters())
    return ModelFacts("blocks", "test", params)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kept_numel", [0, 10**9])
def test_the_formula_is_what_the_engine_allocates(stage: int, precision: str, overlaps: bool, kept_numel: int) -> None:
    if stage < 3 and kept_numel:
        pytest.skip("nothing is gathered below stage 3")
    setting = Setting(
        stage,
        Precision.of(precision),
        persistent_numel=0,
        overlaps=overlaps,
        prefetch_numel=WIDTH * WIDTH,
        kept_numel=kept_numel,
    )
    planned = rank_memory(facts(), setting, WORLD_SIZE)
    for found in run_on_ranks(WORLD_SIZE, _measured, stage, precision, overlaps, kept_numel):
        assert planned.model_states <= found["model_states"] <= 1.02 * planned.model_states
        assert found["peak_in_flight"] <= 1.02 * planned.in_flight
        if stage > 0:  # at stage 0 gloo itself may do the whole sum, out of sight
            assert found["peak_in_flight"] >= 0.5 * planned.in_flight


def _measured(
    rank: int, world_size: int, stage: int, precision: str, overlaps: bool, kept_numel: int
) -> dict[str, int]:
    """Return the bytes that live from step to step, and the most that was in flight at once."""
    import launcher

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": overlaps,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": WIDTH * WIDTH,
            "stage3_max_reuse_distance": kept_numel,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, optimizer, _, _ = launcher.initialize(model=build(), config=config)
    peak_bytes = _train(engine)
    storages = _storages(engine)
    states = sum(storages.values()) + 4 * optimizer.optimizer.state_numel()
    return {"model_states": states, "peak_in_flight": peak_bytes}


def _train(engine: Any) -> int:
    """Take three steps; return the most bytes that were lent at once."""
    buffers = engine._parts.group.buffers
    buffers.peak_bytes = 0  # of the construction
    for _ in range(3):
        dtype = engine._parts.policy.precision.param_dtype
        engine.backward(engine(torch.ones(2, WIDTH, dtype=dtype)).float().mean())
        engine.step()
    engine.synchronize_parameters()
    assert buffers.lent_bytes == 0, "everything in flight has been given back"
    return int(buffers.peak_bytes)


def _storages(engine: Any, *, in_host_memory: bool = False) -> dict[int, int]:
    """Return the bytes of what units keep, by address, in one of the two places."""
    parts = [part for unit in engine._sharded.units for part in (unit.params, unit.grads)]
    tensors = [value for part in parts for value in vars(part).values() if isinstance(value, torch.Tensor)]
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if is_in_host_memory(tensor) == in_host_memory
    }


OPTIMIZER, PART = Offload("cpu"), Offload("cpu", optimizer_ratio=0.5)
OFFLOADS = [
    (1, OPTIMIZER),
    (2, OPTIMIZER),
    (2, PART),
    (3, OPTIMIZER),
    (3, Offload("cpu", "cpu")),
    (3, Offload("cpu", "cpu", optimizer_ratio=0.5)),
    (3, Offload("none", "cpu")),
    (1, Offload("cpu", is_delayed=True)),
    (2, Offload("cpu", is_delayed=True)),
    (3, Offload("cpu", is_delayed=True)),
    (3, Offload("cpu", "cpu", is_delayed=True)),
]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "offload"), OFFLOADS)
def test_the_formula_is_what_rests_on_device_and_host(
    stage: int, offload: Offload, precision: str, world_size: int
) -> None:
    kept = {"persistent_numel": 0, "prefetch_numel": WIDTH * WIDTH, "kept_numel": 0}
    planned = rank_memory(facts(), Setting(stage, Precision.of(precision), offload, **kept), world_size)
    for found in run_on_ranks(world_size, _offloaded, stage, precision, offload):
        assert planned.host <= found["host"] <= 1.02 * planned.host
        assert planned.model_states <= found["device"] <= 1.02 * planned.model_states + 1
        assert found["peak_in_flight"] <= 1.02 * planned.in_flight
        if stage > 1 or world_size > 1:  # else autograd's own gradient only
            assert found["peak_in_flight"] >= 0.3 * planned.in_flight


def _offloaded(rank: int, world_size: int, stage: int, precision: str, offload: Offload) -> dict[str, int]:
    """Return the bytes that rest on the device and in host memory, and the most that was in flight on the device."""
    import launcher

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": WIDTH * WIDTH,
            "stage3_max_reuse_distance": 0,
            "offload_optimizer": {
                "device": offload.optimizer,
                "ratio": offload.optimizer_ratio,
                "delayed_update": offload.is_delayed,
                "delayed_update_warmup_steps": 1,
            },
            "offload_param": {"device": offload.param},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    with late_link():
        engine = launcher.initialize(model=build(), config=config)[0]
        found = {"peak_in_flight": _train(engine), "device": 0, "host": 0}
        for unit in engine._sharded.units:  # states are made beside their master
            place = "host" if is_in_host_memory(unit.params.master) else "device"
            found[place] += sum(state.nbytes for state in unit.state_tensors())
        for place in ("device", "host"):
            found[place] += sum(_storages(engine, in_host_memory=place == "host").values())
        return found
