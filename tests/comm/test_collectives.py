"""Flat collectives on real gloo ranks, against sums computed locally in rank order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from launcher.comm.collectives import all_gather, all_reduce, reduce_scatter


def _body(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [
            torch.randn(world * 32, generator=torch.Generator().manual_seed(r)).to(dtype)
            for r in range(world)
        ]
        want = inputs[0].float()
        for other in inputs[1:]:
            want = want + other.float()
        mine = torch.empty(32)
        reduce_scatter(mine, inputs[rank]).wait()
        assert torch.equal(mine, want.view(world, -1)[rank])
        full = torch.empty(world * 32)
        all_gather(full, mine).wait()
        assert torch.equal(full, want)
        buffer = inputs[rank].clone()
        all_reduce(buffer)
        assert torch.equal(buffer, want.to(dtype))
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sums_are_bit_equal_in_rank_order(world: int, tmp_path: Path) -> None:
    mp.spawn(_body, args=(world, str(tmp_path / "store")), nprocs=world)
