"""What the ranks of a group can do together, and how a group gets the implementation for its backend.

Buffers are flat and 1-D, with one equal chunk for each rank. `collectives` is what the engine calls: it names and
measures the calls that an implementation makes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.comm import observe
from launcher.comm.pending import Pending
from launcher.kernels.cpu import scaled_copy

# Since torch 2.13 the collectives on one flat buffer have other names, and the old ones warn.
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Communicator(Protocol):
    """The collectives of one group; every rank calls the same ones in the same order. Contracts: see `collectives`."""

    def all_gather(self, flat: Tensor, own: Tensor) -> Pending:
        """Start filling `flat` with every rank's `own`, which may be this rank's chunk of `flat` itself."""
        ...

    def reduce_scatter(self, flat: Tensor, output: Tensor, scale: float) -> Pending:
        """Start summing `flat` over the ranks into `output`, this rank's chunk of the sum, times `scale`."""
        ...

    def all_reduce(self, flat: Tensor, sent: Tensor, scale: float) -> Pending:
        """Start summing `sent` over the ranks into `flat`, times `scale`; `sent` may be `flat`, or is used up."""
        ...

    def all_to_all(self, flat: Tensor, output: Tensor) -> Pending:
        """Start sending chunk r of `flat` to rank r, and making chunk r of `output` what rank r has sent here."""
        ...

    def exchange(self, sends: list[Tensor], receives: list[Tensor]) -> Pending:
        """Start sending `sends[r]` to rank r, and filling `receives[r]` with what rank r has sent here."""
        ...

    def transfer(self, transfers: list[Transfer]) -> Pending:
        """Start sending to, and receiving from, single ranks; the two sides of each transfer agree in size."""
        ...

    def gather_rows(self, values: Tensor) -> Tensor:
        """Return every rank's `values` (1-D), [world size, numel]."""
        ...

    def broadcast(self, tensors: list[Tensor], source: int) -> None:
        """Overwrite every rank's tensors with those of rank `source`."""
        ...


class Alone:
    """The collectives of a single process: copies."""

    def all_gather(self, flat: Tensor, own: Tensor) -> Pending:
        """See `Communicator`."""
        copy_unless_same(flat, own)
        return Pending()

    def reduce_scatter(self, flat: Tensor, output: Tensor, scale: float) -> Pending:
        """See `Communicator`."""
        copy_unless_same(output, flat)
        return Pending([], lambda: scale_in_place(output, scale))

    def all_reduce(self, flat: Tensor, sent: Tensor, scale: float) -> Pending:
        """See `Communicator`."""
        return self.reduce_scatter(sent, flat, scale)

    def all_to_all(self, flat: Tensor, output: Tensor) -> Pending:
        """See `Communicator`."""
        output.copy_(flat)
        return Pending()

    def exchange(self, sends: list[Tensor], receives: list[Tensor]) -> Pending:
        """See `Communicator`."""
        receives[0].copy_(sends[0])
        return Pending()

    def transfer(self, transfers: list[Transfer]) -> Pending:
        """See `Communicator`. A single process has no peer."""
        return Pending()

    def gather_rows(self, values: Tensor) -> Tensor:
        """See `Communicator`."""
        return values.unsqueeze(0)

    def broadcast(self, tensors: list[Tensor], source: int) -> None:
        """See `Communicator`."""


class Transfer(NamedTuple):
    """A tensor on its way between this rank and a peer of the group."""

    tensor: Tensor
    peer: int
    is_sent: bool  # else it is received


class Connected:
    """What all backends do alike; peers are ranks of the group, never of the world."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self.rank = process_group.rank()
        self.world_size = process_group.size()

    def exchange(self, sends: list[Tensor], receives: list[Tensor]) -> Pending:
        """See `Communicator`."""
        receives[self.rank].copy_(sends[self.rank])
        return Pending(self.send_and_receive(sends, receives))

    def gather_rows(self, values: Tensor) -> Tensor:
        """See `Communicator`."""
        observe.note_sent(values.nbytes * (self.world_size - 1))
        rows = values.new_empty(self.world_size * values.numel())
        Pending([all_gather_single(rows, values, group=self.process_group, async_op=True)]).wait()
        return rows.view(self.world_size, -1)

    def broadcast(self, tensors: list[Tensor], source: int) -> None:
        """See `Communicator`."""
        if self.rank == source:
            observe.note_sent(sum(tensor.nbytes for tensor in tensors) * (self.world_size - 1))
        dense = [each.contiguous() for each in tensors]
        # As bytes: backends lack types that buffers have, such as uint16, and complex numbers.
        sent = [each.view(-1).view(torch.uint8) for each in dense]
        works = [dist.broadcast(t, group=self.process_group, group_src=source, async_op=True) for t in sent]
        Pending(works).wait()
        for mine, received in zip(tensors, dense, strict=True):
            if received is not mine:
                mine.copy_(received)

    def transfer(self, transfers: list[Transfer]) -> Pending:
        """Start transfers with single peers. Both sides must start them in the same order."""
        observe.note_sent(sum(one.tensor.nbytes for one in transfers if one.is_sent))
        return Pending(self._begin(transfers) if transfers else [])

    def send_and_receive(self, sends: list[Tensor], receives: list[Tensor]) -> list[dist.Work]:
        """Send `sends[peer]` to, and receive `receives[peer]` from, every other rank at once."""
        rank, world_size = self.rank, self.world_size
        transfers: list[Transfer] = []
        observe.note_sent(sum(sends[peer].nbytes for peer in range(world_size) if peer != rank))
        for distance in range(1, world_size):  # each rank starts at another peer: no rank is a hot spot
            to, source = (rank + distance) % world_size, (rank - distance) % world_size
            if sends[to].numel():
                transfers.append(Transfer(sends[to], to, is_sent=True))
            if receives[source].numel():
                transfers.append(Transfer(receives[source], source, is_sent=False))
        return self._begin(transfers) if transfers else []

    def _begin(self, transfers: list[Transfer]) -> list[dist.Work]:
        """Start transfers that wait for one another."""
        group = self.process_group
        calls = [
            dist.P2POp(dist.isend if one.is_sent else dist.irecv, one.tensor, group=group, group_peer=one.peer)
            for one in transfers
        ]
        return list(dist.batch_isend_irecv(calls))


def copy_unless_same(target: Tensor, source: Tensor) -> None:
    """Copy `source` to `target`, unless they are the same memory."""
    if target.data_ptr() != source.data_ptr():
        scaled_copy(target, source, 1.0)


def scale_in_place(tensor: Tensor, scale: float) -> None:
    """Multiply a tensor by `scale`; 1 costs nothing."""
    if scale != 1.0:
        tensor.mul_(scale)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums that end in `dtype` are scaled: never a 16-bit one."""
    return torch.promote_types(dtype, torch.float32)
