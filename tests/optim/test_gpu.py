"""On a GPU every optimizer computes what it computes on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from launcher.comm.buffers import BufferPool
from launcher.kernels.select import kernel_for
from launcher.monitor.phases import PhaseTimer
from launcher.optim.api import FlatShard
from launcher.optim.catalog import ELEMENTWISE
from launcher.optim.factory import Means, plan_from_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NUMEL = 1000


def means_of(device: str) -> Means:
    kernel = kernel_for(device)
    return Means({} if kernel is None else {device: kernel}, BufferPool(torch.device(device)))


def train(name: str, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shard = FlatShard(
        torch.randn(NUMEL, generator=generator).to(device), torch.zeros(NUMEL, device=device), group=0, unit=0
    )
    flat = plan_from_config(name, {"momentum": 0.9} if name == "SGD" else {}, nn.Linear(1, 1), None).build(
        [shard], means_of(device)
    )
    for step in range(5):
        shard.grad.copy_(torch.randn(NUMEL, generator=generator))
        flat.step({0: [range(100, 300)]} if step == 2 else None)
    return shard.master.cpu()


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_optimizer_on_the_gpu(name: str) -> None:
    torch.testing.assert_close(train(name, "cuda"), train(name, "cpu"), rtol=1e-4, atol=1e-5)


def test_a_state_moves_to_the_gpu() -> None:
    plan = plan_from_config("AdamW", {}, nn.Linear(1, 1), None)
    shards = [FlatShard(torch.ones(8, device=d), torch.ones(8, device=d), group=0) for d in ("cpu", "cuda")]
    source, target = (plan.build([shard], means_of(shard.master.device.type)) for shard in shards)
    source.step()
    target.load_state_dict(source.state_dict())
    shards[1].master.copy_(shards[0].master)
    source.step()
    target.step()
    torch.testing.assert_close(shards[1].master.cpu(), shards[0].master)


def test_phases_on_the_gpu_are_the_devices_time() -> None:
    timer = PhaseTimer(torch.device("cuda"))
    with timer.span("sleep"):
        torch.cuda._sleep(10_000_000)
    assert timer.take()["sleep"] > 1e-3
    assert timer.take() == {}
