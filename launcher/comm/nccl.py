"""Collectives between GPUs: NCCL's own, and those of any backend that has quick ones.

Every call is one collective on one flat buffer: rings, trees and reductions within the switches are NCCL's to choose.
So are the order of sums, which is not that of the ranks, and thereby their last bits; they are taken in the type that
travels.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from launcher.comm import observe
from launcher.comm.buffers import BufferPool
from launcher.comm.communicator import (
    Connected,
    all_gather_single,
    copy_unless_same,
    reduce_scatter_single,
    scale_in_place,
    sum_dtype,
)
from launcher.comm.pending import Pending


class NcclCommunicator(Connected):
    """See `Communicator`."""

    def __init__(self, process_group: dist.ProcessGroup, buffers: BufferPool) -> None:
        """buffers: lends memory for sums of another type than their output."""
        super().__init__(process_group)
        self._buffers = buffers

    def all_gather(self, flat: Tensor, own: Tensor) -> Pending:
        """See `Communicator`."""
        observe.note_sent(own.nbytes * (self.world_size - 1))
        return Pending([all_gather_single(flat, own, group=self.process_group, async_op=True)])

    def reduce_scatter(self, flat: Tensor, output: Tensor, scale: float) -> Pending:
        """See `Communicator`. The sum is taken in the type of `flat`."""
        observe.note_sent(flat.nbytes // self.world_size * (self.world_size - 1))
        operation, remaining = self._operation(scale)
        if flat.dtype == output.dtype:
            work = reduce_scatter_single(output, flat, operation, group=self.process_group, async_op=True)
            return Pending([work], lambda: scale_in_place(output, remaining))
        total = self._buffers.borrow(output.numel(), flat.dtype)

        def finish() -> None:
            _convert(total, output, remaining)
            self._buffers.give_back(total)

        work = reduce_scatter_single(total, flat, operation, group=self.process_group, async_op=True)
        return Pending([work], finish)

    def all_reduce(self, flat: Tensor, sent: Tensor, scale: float) -> Pending:
        """See `Communicator`. The sum is taken in the type of `sent`."""
        observe.note_sent(2 * (self.world_size - 1) * sent.nbytes // self.world_size)  # a ring's: the least there is
        operation, remaining = self._operation(scale)
        work = dist.all_reduce(sent, operation, group=self.process_group, async_op=True)
        return Pending([work], lambda: _convert(sent, flat, remaining))

    def all_to_all(self, flat: Tensor, output: Tensor) -> Pending:
        """See `Communicator`."""
        observe.note_sent(flat.nbytes // self.world_size * (self.world_size - 1))
        return Pending([dist.all_to_all_single(output, flat, group=self.process_group, async_op=True)])

    def _operation(self, scale: float) -> tuple[dist.ReduceOp.RedOpType, float]:
        """Return what NCCL computes, and the factor that is left: the mean costs no pass of its own.

        NCCL divides each term before it adds it, so that a mean of fp16 overflows only where a term does.
        """
        return (dist.ReduceOp.AVG, 1.0) if scale == 1.0 / self.world_size else (dist.ReduceOp.SUM, scale)


def _convert(total: Tensor, output: Tensor, scale: float) -> None:
    """Write a sum times `scale` to `output`, which may be the sum itself."""
    if total is output or output.dtype == sum_dtype(output.dtype):
        copy_unless_same(output, total)
        scale_in_place(output, scale)
    else:  # what 16 bits cannot hold may be a sum, and not the mean
        output.copy_(total.to(sum_dtype(output.dtype)).mul_(scale))
