"""Collectives on flat 1-D buffers that hold one equal chunk per rank: by name, and measured where a config asks.

How they are done is the group's communicator's to know: see `backends`.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.comm import observe
from launcher.comm.groups import RankGroup
from launcher.comm.pending import Pending, begin_call, end_call, name_next

T = TypeVar("T")


def _begin(kind: str, group: RankGroup) -> float | None:
    """Count a call; return the time at which it begins, None when it is not measured."""
    if group.process_group is None:
        name_next("")  # nothing is begun
        return None
    begin_call(kind, group.process_group)
    return observe.begin(group.device)


def _observed(kind: str, group: RankGroup, tensors: list[Tensor], begun_s: float | None, pending: Pending) -> Pending:
    """Give a collective its name; when calls are measured, wait for it."""
    end_call()
    pending.kind = kind
    if begun_s is not None:
        pending.wait()
        observe.end(begun_s, kind, group.world_size, tensors, group.device)
    return pending


def reduce_scatter(group: RankGroup, flat: Tensor, output: Tensor, scale: float = 1.0) -> Pending:
    """Sum `flat` over all ranks and leave this rank's chunk of the sum, times `scale`, in `output`.

    flat: 1-D, numel = world size * chunk. output: 1-D, numel = chunk; may be this rank's chunk of `flat` itself.
    `flat` is sent as it is. On gloo the sum is taken in fp32 and in rank order, on NCCL in the type of `flat` and in
    NCCL's order. Every rank must call it, in the same order among all collectives.
    """
    begun_s = _begin("reduce_scatter", group)
    return _observed("reduce_scatter", group, [flat], begun_s, group.communicator.reduce_scatter(flat, output, scale))


def all_gather(group: RankGroup, flat: Tensor, own: Tensor | None = None) -> Pending:
    """Fill `flat` with every rank's chunk.

    flat: 1-D, numel = world size * chunk. own: this rank's chunk, 1-D, which must stay as it is until `wait()`; None:
    it is in its place already. Every rank must call it, in the same order.
    """
    if own is None:
        numel = flat.numel() // group.world_size
        own = flat[group.rank * numel : (group.rank + 1) * numel]
    begun_s = _begin("all_gather", group)
    return _observed("all_gather", group, [flat], begun_s, group.communicator.all_gather(flat, own))


def all_to_all(group: RankGroup, flat: Tensor, output: Tensor) -> Pending:
    """Send chunk r of `flat` to rank r, and make chunk r of `output` what rank r has sent here.

    flat, output: 1-D, of the same dtype, numel = world size * chunk; they must not overlap. Every rank must call it, in
    the same order.
    """
    begun_s = _begin("all_to_all", group)
    return _observed("all_to_all", group, [flat], begun_s, group.communicator.all_to_all(flat, output))


def exchange(group: RankGroup, sends: list[Tensor], receives: list[Tensor]) -> Pending:
    """Send `sends[r]` to every rank r, and fill `receives[r]` with what rank r has sent here.

    sends, receives: 1-D, of one dtype and any sizes, where the two sides of each transfer agree; 0 sends nothing. Every
    rank must call it, in the same order.
    """
    begun_s = _begin("exchange", group)
    return _observed("all_to_all", group, sends, begun_s, group.communicator.exchange(sends, receives))


def all_reduce(group: RankGroup, flat: Tensor, scale: float = 1.0, *, sent: Tensor | None = None) -> Pending:
    """Sum `flat` over all ranks in place and multiply it by `scale`.

    On gloo with more than two ranks a reduce-scatter, then as a second phase an all-gather. flat: 1-D,
    numel = world size * chunk. sent: what is summed into `flat` instead of its own content, perhaps of another dtype;
    its own content is undefined afterwards. The sum is taken as by `reduce_scatter`. Every rank must call it, and
    advance or wait, in the same order.
    """
    begun_s = _begin("all_reduce", group)
    pending = group.communicator.all_reduce(flat, flat if sent is None else sent, scale)
    return _observed("all_reduce", group, [flat], begun_s, pending)


def sum_scalars(group: RankGroup, values: Tensor) -> Tensor:
    """Return the sum of a small float64 tensor over all ranks, added in rank order on each of them."""
    return gather_rows(group, values).sum(dim=0)


def gather_rows(group: RankGroup, values: Tensor) -> Tensor:
    """Return every rank's small tensor, [world size, *shape] in rank order. Every rank must call it."""
    begun_s = _begin("gather_rows", group)
    rows = group.communicator.gather_rows(values.reshape(-1))
    _observed("all_gather", group, [rows], begun_s, Pending())
    return rows.view(group.world_size, *values.shape)


def gather_scalars(group: RankGroup, value: float) -> list[float]:
    """Return every rank's value, in rank order. Every rank must call it."""
    own = torch.tensor([value], dtype=torch.float64, device=group.device)
    found: list[float] = gather_rows(group, own).reshape(-1).tolist()
    return found


def gather_objects(group: RankGroup, value: T) -> list[T]:
    """Return every rank's value, which is pickled, in rank order. Every rank must call it."""
    values = [value] * group.world_size
    if group.process_group is not None:
        dist.all_gather_object(values, value, group=group.process_group)
    return values


def broadcast(group: RankGroup, tensors: list[Tensor], source: int = 0) -> None:
    """Overwrite every rank's tensors with those of rank `source`. Every rank must call it with equal shapes."""
    begun_s = _begin("broadcast", group)
    group.communicator.broadcast(tensors, source)
    _observed("broadcast", group, tensors, begun_s, Pending())
