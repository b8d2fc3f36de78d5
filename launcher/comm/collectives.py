"""Collectives on flat 1-D buffers, in the quickest form per backend.

On gloo, sums run in fp32 and in rank order, so results are the same bits in every run and on every
rank. NCCL uses its own collectives and its own order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Handle:
    """A collective under way; `wait` must be called once by every rank before its output is read."""

    works: list[Any] = field(default_factory=list)
    finish: Callable[[], None] | None = None

    def wait(self) -> None:
        """Block until the output is complete."""
        for work in self.works:
            work.wait()
        self.works = []
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None = None) -> Handle:
    """Start gathering every rank's `shard` into `output` (1-D, numel = world * shard); all ranks call.

    `shard` may be this rank's own slice of `output`.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if dist.get_backend(group) == "nccl":
        return Handle([dist.all_gather_into_tensor(output, shard, group=group, async_op=True)])
    pieces = output.view(world, -1)
    if pieces[rank].data_ptr() != shard.data_ptr():
        pieces[rank].copy_(shard)
    return Handle(_exchange(lambda peer: pieces[rank], lambda peer: pieces[peer], rank, world, group))


def reduce_scatter(
    output: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup | None = None
) -> Handle:
    """Start summing every rank's `full` (1-D, numel = world * output) and keep this rank's slice.

    `output` may be fp32 while `full` is 16-bit: then the sum itself runs in fp32 (gloo), from the
    16-bit values the ranks sent. `full` must stay unchanged until `wait`.
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if dist.get_backend(group) == "nccl":
        source = full.to(output.dtype)
        return Handle([dist.reduce_scatter_tensor(output, source, group=group, async_op=True)])
    pieces = full.view(world, -1)
    received = [pieces[rank] if peer == rank else torch.empty_like(pieces[rank]) for peer in range(world)]
    works = _exchange(lambda peer: pieces[peer], lambda peer: received[peer], rank, world, group)

    def add_in_rank_order() -> None:
        total = received[0].to(torch.float32, copy=True)
        for piece in received[1:]:
            total.add_(piece)
        output.copy_(total)

    return Handle(works, add_in_rank_order)


def all_reduce(buffer: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum `buffer` (1-D, numel a multiple of the world size) over all ranks, in place; blocks."""
    if dist.get_backend(group) == "nccl":
        dist.all_reduce(buffer, group=group)
        return
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    shard = buffer.view(world, -1)[rank]
    total = torch.empty_like(shard)
    reduce_scatter(total, buffer, group).wait()
    all_gather(buffer, total, group).wait()


def _exchange(
    send: Callable[[int], torch.Tensor],
    receive: Callable[[int], torch.Tensor],
    rank: int,
    world: int,
    group: dist.ProcessGroup | None,
) -> list[Any]:
    """Start one send to and one receive from every other rank, in group ranks."""
    works: list[Any] = []
    for step in range(1, world):
        target, source = (rank + step) % world, (rank - step) % world
        works.append(dist.isend(send(target), group=group, group_dst=target))
        works.append(dist.irecv(receive(source), group=group, group_src=source))
    return works
