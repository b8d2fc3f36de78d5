"""On a GPU every optimizer computes what it computes on the CPU."""

from __future__ import annotations

import pytest
import torch
from harness.train.shards import full_shard, shards_of_unit
from torch import nn

from launcher.comm.buffers import BufferPool
from launcher.kernels.select import kernel_for
from launcher.monitor.meters import PhaseTimer
from launcher.optim.catalog import ELEMENTWISE
from launcher.optim.factory import OptimizerBackend, plan_from_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NUMEL = 1000


def means_of(device: str) -> OptimizerBackend:
    kernel = kernel_for(device)
    return OptimizerBackend({} if kernel is None else {device: kernel}, BufferPool(torch.device(device)))


def train(name: str, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(NUMEL, generator=generator).to(device).split([100, 200, 700])
    shards = shards_of_unit(values, range(NUMEL))
    flat = plan_from_config(name, {"momentum": 0.9} if name == "SGD" else {}, nn.Linear(1, 1), None).build(
        shards, means_of(device)
    )
    for step in range(5):
        for shard in shards:
            shard.grad.copy_(torch.randn(shard.numel, generator=generator))
        flat.step(unused=["p1"] if step == 2 else [])
    return torch.cat([shard.master for shard in shards]).cpu()


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_optimizer_on_the_gpu(name: str) -> None:
    torch.testing.assert_close(train(name, "cuda"), train(name, "cpu"), rtol=1e-4, atol=1e-5)


def test_a_state_moves_to_the_gpu() -> None:
    plan = plan_from_config("AdamW", {}, nn.Linear(1, 1), None)
    shards = [full_shard(torch.ones(8, device=device)) for device in ("cpu", "cuda")]
    for shard in shards:
        shard.grad.fill_(1.0)
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
