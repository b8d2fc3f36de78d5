"""The gradients of a unit on one rank: what autograd left, its sum over the ranks, the owned range of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.comm import collectives
from launcher.comm.collectives import Pending
from launcher.comm.groups import DataParallelGroup
from launcher.zero.layout import UnitLayout
from launcher.zero.stages import UnitState, ZeroPolicy, check_transition


class UnitGradients:
    """Collects, reduces and holds the gradients of one unit.

    Sums over ranks and micro-batches are fp32. What travels is the gradient as autograd made it: a 16-bit gradient of
    one micro-batch is sent in 16 bits, which loses nothing; only a sum of several micro-batches is sent in fp32.
    """

    def __init__(
        self,
        members: tuple[list[str], list[nn.Parameter]],
        layout: UnitLayout,
        policy: ZeroPolicy,
        group: DataParallelGroup,
        owned: range,
    ) -> None:
        self._names, self._params = members
        self._layout = layout
        self._group = group
        self._owned = owned
        self.state = UnitState.IDLE
        self._is_whole = len(owned) == layout.padded_numel
        self._is_kept_whole = self._is_whole or not policy.stage.shards_gradients
        self._wire_dtype = policy.precision.param_dtype
        self._local: Tensor | None = None  # 1-D [padded]; fp32 where it is kept, else the wire's dtype
        self._wire: Tensor | None = None  # 1-D [padded], a 16-bit copy of `_local` on its way
        self._arriving: Tensor | None = None  # 1-D [owned], the sum of a further micro-batch
        if self._is_kept_whole:
            self._local = torch.zeros(layout.padded_numel, dtype=torch.float32, device=group.device)
            self.owned_grad = self._local[owned.start : owned.stop]  # 1-D [owned], fp32
        else:
            self.owned_grad = torch.zeros(len(owned), dtype=torch.float32, device=group.device)
        self._filled = [False] * len(layout.slots)  # has a gradient in the local buffer
        self._arrived = [False] * len(layout.slots)  # has a gradient of the current backward
        self._num_arrived = 0
        self.used = [False] * len(layout.slots)  # had a gradient on this rank since the last step
        self._num_backwards = 0  # since the local buffer was last empty
        self._owned_holds_sum = False  # an earlier micro-batch is in `owned_grad`
        self._reduction: Pending | None = None
        self.norm: Tensor | None = None  # 2-norm of `owned_grad`, scalar fp32, when it is known

    def begin_backward(self) -> None:
        """Forget which gradients of the previous backward have arrived."""
        self._arrived = [False] * len(self._arrived)
        self._num_arrived = 0
        self._num_backwards += 1
        self.norm = None

    @property
    def is_complete(self) -> bool:
        """Say whether every parameter's gradient of this backward has arrived."""
        return self._num_arrived == len(self._arrived)

    def take(self, index: int) -> None:
        """Move the gradient autograd left on parameter `index` into the buffer.

        Raises: EngineError when the unit's sum is on its way already.
        """
        if self.state is UnitState.REDUCING:
            raise EngineError(
                f"a second gradient of {self._names[index]} came in one backward pass",
                hint='set "overlap_comm": false; reentrant activation checkpointing does this',
            )
        self.state = check_transition(self.state, UnitState.ACCUMULATING)
        param = self._params[index]
        grad, param.grad = param.grad, None
        if grad is None:
            return
        if grad.is_sparse:
            grad = grad.to_dense()
        slot = self._layout.slots[index]
        target = self._buffer()[slot.offset : slot.end].view(grad.shape)
        if self._filled[index]:
            target.add_(grad)
        else:
            target.copy_(grad)
        self._filled[index] = self.used[index] = True
        if not self._arrived[index]:
            self._arrived[index] = True
            self._num_arrived += 1

    def _buffer(self) -> Tensor:
        if self._local is None:
            self._local = self._group.buffers.borrow(self._layout.padded_numel, self._wire_dtype)
        return self._local

    def start_reduction(self, scale: float) -> None:
        """Start summing the gradients over the ranks, times `scale`. Every rank must call it in the same order."""
        self.state = check_transition(self.state, UnitState.ACCUMULATING)
        self.state = check_transition(self.state, UnitState.REDUCING)
        local = self._buffer()
        for slot, filled in zip(self._layout.slots, self._filled, strict=True):
            if not filled:  # unused on this rank: other ranks may have used it, so its place is sent as zeros
                local[slot.offset : slot.end].zero_()
        end = self._layout.slots[-1].end
        local[end:].zero_()
        if self._is_whole:
            self._reduction = collectives.all_reduce(self._group, local, scale)
            return
        sent, output = local, self.owned_grad
        if self._is_kept_whole and self._wire_dtype != local.dtype and self._num_backwards == 1:
            self._wire = sent = self._group.buffers.borrow(local.numel(), self._wire_dtype)
            sent.copy_(local)
        elif self._owned_holds_sum:
            self._arriving = output = self._group.buffers.borrow(len(self._owned), torch.float32)
        self._reduction = collectives.reduce_scatter(self._group, sent, output, scale)

    def advance_reduction(self) -> None:
        """Wait for the phase under way and start the next one, where there is one."""
        if self._reduction is not None:
            self._reduction = self._reduction.advance()

    def finish_reduction(self, *, measure: bool = False) -> None:
        """Wait for the sum and give temporary buffers back. measure: take the norm while the sum is in the cache."""
        if self._reduction is None:
            return
        self._reduction.wait()
        self._reduction = None
        self.state = check_transition(self.state, UnitState.REDUCED)
        self._filled = [False] * len(self._filled)
        self._num_backwards = 0
        if self._arriving is not None:
            self.owned_grad.add_(self._arriving)
            self._group.buffers.give_back(self._arriving)
            self._arriving = None
        if self._wire is not None:
            self._group.buffers.give_back(self._wire)
            self._wire = None
        if not self._is_kept_whole:
            self._owned_holds_sum = True
            self._give_local_back()
        if measure:
            self.norm = torch.linalg.vector_norm(self.owned_grad)

    def _give_local_back(self) -> None:
        if self._local is not None:
            self._group.buffers.give_back(self._local)
            self._local = None

    def discard(self) -> None:
        """Forget all gradients; the next backward overwrites the buffers."""
        self.finish_reduction()
        if not self._is_kept_whole:
            self._give_local_back()
        self._filled = [False] * len(self._filled)
        self.used = [False] * len(self.used)
        self._num_backwards = 0
        self._owned_holds_sum = False
        self.norm = None
        self.state = check_transition(self.state, UnitState.IDLE)
