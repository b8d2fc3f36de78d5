"""On a GPU: pinned host memory, copies beside the computing, Triton and C++ kernels in one step, the same losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.train.zoo import LR, WEIGHT_DECAY, batches, build

import launcher
from launcher.comm.device import HostDeviceCopier
from launcher.comm.streams import Side, streams_of
from launcher.zero.access import safe_get_full_grad, safe_get_full_optimizer_state

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
HOST = {"device": "cpu"}
OPTIMIZER, PARAMS = {"offload_optimizer": HOST}, {"offload_param": HOST}
PART = {"offload_optimizer": {**HOST, "ratio": 0.4}}
MEBI = 2**20


def train(stage: int, zero: dict[str, Any], precision: str, accumulation: int = 1) -> tuple[list[float], Any]:
    """Train on one GPU, in this process; return the losses and the engine."""
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.1,
        "steps_per_print": 0,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 1072,
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 1072,
            **zero,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
    }
    engine = launcher.initialize(model=build("Plain"), config=config)[0]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    losses = []
    for x, y in batches(6 * accumulation):
        loss = engine(x.to(engine.device, dtype), y.to(engine.device, dtype)).float()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("stage", "zero"),
    [(1, OPTIMIZER), (2, OPTIMIZER), (2, PART), (3, OPTIMIZER), (3, {**OPTIMIZER, **PARAMS}), (3, {**PART, **PARAMS})],
)
def test_losses_are_those_without_offload(stage: int, zero: dict[str, Any], precision: str, accumulation: int) -> None:
    expected, _ = train(stage, {}, precision, accumulation)
    found, _ = train(stage, zero, precision, accumulation)
    assert found == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 1e-2)  # two kernels, two roundings
    assert found[-1] < found[0]


def test_where_things_rest() -> None:
    _, engine = train(3, {**PART, **PARAMS}, "bf16")
    units = engine._sharded.units
    assert all(unit.params.shard.is_pinned() for unit in units)
    assert [unit.params.master.is_cuda for unit in units] == [False, False, True, True, True]
    assert [unit.grads.optimizer_grad.is_cuda for unit in units] == [False, False, True, True, True]
    assert all(unit.grads.optimizer_grad.is_pinned() for unit in units[:2])


def test_what_a_script_sees_between_backward_and_step() -> None:
    seen = []
    for zero in ({}, OPTIMIZER):
        _, engine = train(2, zero, "fp32")
        x, y = (tensor.to(engine.device) for tensor in batches(1)[0])
        engine.backward(engine(x, y))
        weight = engine.module.blocks[0].up.weight
        seen.append((safe_get_full_grad(weight), safe_get_full_optimizer_state(weight, "exp_avg_sq")))
        engine.step()
    for found, expected in zip(*seen, strict=True):
        assert found.is_cuda
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-7)


def test_a_copy_runs_beside_the_computing_and_its_arrival_is_in_order() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    streams = streams_of(device)
    link = HostDeviceCopier(device, streams)
    host = link.empty(64 * MEBI, torch.float32, is_pinned=True).fill_(1.0)
    there = torch.zeros(64 * MEBI, device=device)
    torch.cuda.synchronize()
    arrival = link.copy(there, host)
    behind = torch.cuda.Event()
    torch.ones(1, device=device)  # does not wait for the copy
    behind.record()
    behind.synchronize()
    assert not streams._sides[Side.TO_DEVICE].query(), "256 MiB were copied before one number was set"  # type: ignore[attr-defined]
    arrival.wait()
    assert there.sum().item() == 64 * MEBI
    there.add_(1)
    link.copy(host, there)
    streams.keep(there, Side.TO_HOST)
    there = torch.zeros(1, device=device)  # memory that is being copied may be given back
    link.synchronize()
    assert host.sum().item() == 2 * 64 * MEBI
