"""Stages 0, 1, 2 on real gloo ranks against one plain process that sees every micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from launcher.optim.adam import build_adam
from launcher.zero.layout import ParamSpec, plan_units
from launcher.zero.stages import STAGES
from launcher.zero.unit import FlatUnit

STEPS, ACCUMULATION, OPTIONS = 8, 2, {"lr": 1e-2, "weight_decay": 0.1}


def _model(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(9, 17), torch.nn.Tanh(), torch.nn.Linear(17, 5)).to(dtype)


def _loss(model: torch.nn.Module, seed: int, dtype: torch.dtype) -> torch.Tensor:
    batch = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return model(batch).float().square().mean() / ACCUMULATION


def _reference(world: int, dtype: torch.dtype) -> list[torch.Tensor]:
    model = _model(dtype)
    params = list(model.parameters())
    masters = [p.detach().float().clone() for p in params]
    optimizer = torch.optim.AdamW(masters, **OPTIONS)
    for step in range(STEPS):
        sums = [torch.zeros_like(m) for m in masters]
        for seed in range(step * 100, step * 100 + world * ACCUMULATION):
            grads = torch.autograd.grad(_loss(model, seed, dtype), params)
            for total, grad in zip(sums, grads, strict=True):
                total.add_(grad)
        for master, total in zip(masters, sums, strict=True):
            master.grad = total / world
        optimizer.step()
        for param, master in zip(params, masters, strict=True):
            param.data.copy_(master)
    return [p.detach().float() for p in params]


def _body(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for dtype, bound in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
        want = _reference(world, dtype)
        for policy in STAGES.values():
            model = _model(dtype)
            named = dict(model.named_parameters())
            specs = [ParamSpec(n, p.numel(), str(dtype), n.split(".")[0]) for n, p in named.items()]
            units = [FlatUnit(layout, named, policy, rank) for layout in plan_units(specs, world, 100)]
            optimizer = build_adam([[u.master for u in units]], [OPTIONS])
            for step in range(STEPS):
                for micro in range(ACCUMULATION):
                    _loss(model, step * 100 + rank * ACCUMULATION + micro, dtype).backward()
                    for unit in units:
                        unit.collect()
                for unit in units:
                    unit.finish_gradients()
                    unit.master.grad = unit.grad
                optimizer.step()
                for unit in units:
                    unit.master.grad = None
                    unit.write_back()
            for param, expected in zip(model.parameters(), want, strict=True):
                torch.testing.assert_close(param.detach().float(), expected, rtol=bound, atol=bound)
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_weights_equal_the_plain_loop(world: int, tmp_path: Path) -> None:
    mp.spawn(_body, args=(world, str(tmp_path / "store")), nprocs=world)
