"""The gradients of a unit on one rank: what autograd left, its sum over the ranks, the owned range of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from launcher.comm import collectives, observe
from launcher.comm.groups import DataParallelGroup
from launcher.comm.pending import Pending
from launcher.kernels.select import kernel_for
from launcher.zero.home import HERE, Home
from launcher.zero.layout import UnitLayout
from launcher.zero.stages import UnitState, ZeroPolicy, check_transition


def sum_of_squares(grad: Tensor) -> Tensor:
    """Return the sum of squares of a gradient, scalar fp64; not finite when an element is not."""
    kernel = kernel_for(grad.device.type)
    if kernel is not None:
        return kernel.sum_of_squares([grad])
    norm: Tensor = torch.linalg.vector_norm(grad, dtype=torch.float32)  # its sum in fp64 is 40 times slower on a CPU
    return norm.double().square()


class UnitGradients:
    """Collects, reduces and holds the gradients of one unit.

    Sums over micro-batches are fp32 unless the policy says otherwise. What travels is what autograd made: a 16-bit
    gradient of one micro-batch is sent in 16 bits, which loses nothing; only a sum of several micro-batches is sent in
    fp32. A policy may name the type that travels. Sums over ranks are fp32 on gloo, and what travels on NCCL.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        layout: UnitLayout,
        policy: ZeroPolicy,
        group: DataParallelGroup,
        owned: range,
        *,
        home: Home = HERE,
        label: str = "",
    ) -> None:
        """home: where the optimizer updates the unit. label: of the unit, for profilers and the debug log."""
        self._label = label
        self._params = params
        self._layout = layout
        self._group = group
        self._reductions = group.reductions
        self._scale = policy.reduction.factor(group.world_size)
        self._owned = owned
        self.state = UnitState.IDLE
        self._is_whole = len(owned) == layout.padded_numel
        self._leaves = home.is_away and policy.stage.shards_gradients  # as soon as it is summed
        self._is_kept_whole = not self._leaves and (self._is_whole or not policy.stage.shards_gradients)
        self._link = group.link
        self._policy = policy
        sum_dtype = policy.precision.grad_dtype
        self._wire_dtype = policy.precision.wire_dtype or policy.precision.param_dtype
        self._local: Tensor | None = None  # 1-D [padded]; where it is kept as sums are, else the wire's dtype
        self._wire: Tensor | None = None  # 1-D [padded], a copy of `_local` in the wire's dtype on its way
        self._arriving: Tensor | None = None  # the sum of a further micro-batch: 1-D [owned], or [padded] of all ranks
        if self._is_kept_whole:
            self._local = torch.zeros(layout.padded_numel, dtype=sum_dtype, device=group.device)
            self.owned_grad = self._local[owned.start : owned.stop]  # 1-D [owned]
        elif self._leaves:
            self.owned_grad = home.empty(len(owned), sum_dtype, group).zero_()
        else:
            self.owned_grad = torch.zeros(len(owned), dtype=sum_dtype, device=group.device)
        # 1-D [owned]: what the optimizer reads
        self.home_grad = self.owned_grad
        if home.is_away and not self._leaves:
            self.home_grad = home.empty(len(owned), sum_dtype, group).zero_()
        # 1-D [owned], takes turns with `home_grad` where a delayed update reads that beside the next backward.
        self._spare_grad = home.empty(len(owned), sum_dtype, group) if policy.offload.is_delayed else self.home_grad
        self._is_handed_over = False
        self.swap = home.swapped(self.home_grad)
        if self.swap is not None:
            self.swap.drop()
        self._factor = 1.0  # what the last sum over the ranks was multiplied by
        self._early_scale = self._exact_scale() if self._is_kept_whole else 1.0  # of gradients as they are taken
        self._filled = [False] * len(layout.slots)  # has a gradient in the local buffer
        self._arrived = [False] * len(layout.slots)  # has a gradient of the current backward
        self._num_arrived = 0
        self._is_sent = False  # the sum of the current backward was begun
        self.used = [False] * len(layout.slots)  # had a gradient on this rank since the last step
        self._num_backwards = 0  # since the local buffer was last empty
        self._owned_holds_sum = False  # an earlier micro-batch is in `owned_grad`
        self._reduction: Pending | None = None
        own = layout.chunk_range(group.rank) if self._is_whole else range(len(owned))
        self._counted = slice(own.start, own.stop)  # of `owned_grad`: each element is counted by one rank
        self._is_local = False  # the last reduction left every rank its own gradient
        self._square: Tensor | None = None  # scalar fp64: the sum of squares, when it is known

    def _exact_scale(self) -> float:
        """Return the factor of the average over ranks if taking it early rounds nothing, else 1.

        It saves a pass over the buffer. A power of two is exact in fp32 and bf16; fp16 would underflow.
        """
        precision = self._policy.precision
        factor = self._scale
        is_exact = math.frexp(factor)[0] == 0.5
        is_wide = precision.grad_dtype == torch.float32 and self._wire_dtype != torch.float16
        return factor if is_exact and is_wide and self._policy.reduction.predivide == 1.0 else 1.0

    def begin_backward(self) -> None:
        """Forget which gradients of the previous backward have arrived."""
        if self._is_kept_whole and self.state is UnitState.REDUCED:
            self._reopen()
        if self._is_handed_over:
            self.home_grad, self._spare_grad, self._is_handed_over = self._spare_grad, self.home_grad, False
            if self._leaves:
                self.owned_grad = self.home_grad
        self._arrived = [False] * len(self._arrived)
        self._num_arrived = 0
        self._num_backwards += 1
        self._square = None
        self._is_sent = False

    def drop_late(self) -> None:
        """Forget gradients that came after the sum was begun."""
        if self._is_sent:
            for param in self._params:
                param.grad = None

    @property
    def is_complete(self) -> bool:
        """Say whether every parameter's gradient of this backward has arrived, at least once."""
        return self._num_arrived == len(self._arrived)

    @property
    def has_late(self) -> bool:
        """Whether gradients came after the sum was begun. They wait in `param.grad`, where later ones are added."""
        return self._is_sent and any(param.grad is not None for param in self._params)

    def take(self, index: int) -> None:
        """Move the gradient autograd left on parameter `index` into the buffer.

        After the sum was begun it stays where it is, and autograd adds further ones to it: see `reduce_late`.
        """
        if self._is_sent:
            return
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
            target.add_(grad, alpha=self._early_scale)
        elif self._early_scale == 1.0:
            target.copy_(grad)
        else:
            torch.mul(grad, self._early_scale, out=target)
        self._filled[index] = self.used[index] = True
        if not self._arrived[index]:
            self._arrived[index] = True
            self._num_arrived += 1

    def drop(self, index: int) -> None:
        """Forget the gradient autograd left on parameter `index`."""
        self._params[index].grad = None

    def _buffer(self) -> Tensor:
        if self._local is None:
            self._local = self._group.buffers.borrow(self._layout.padded_numel, self._wire_dtype)
        return self._local

    def start_reduction(self, *, stays_local: bool = False) -> None:
        """Start summing, or averaging, the gradients over the ranks. Every rank must call it in the same order.

        stays_local: send nothing; every rank's own gradient becomes what has the same mean over the ranks as the sum.
        """
        self.state = check_transition(self.state, UnitState.ACCUMULATING)
        self.state = check_transition(self.state, UnitState.REDUCING)
        self._is_sent = True
        local = self._buffer()
        for slot, filled in zip(self._layout.slots, self._filled, strict=True):
            if not filled:  # unused on this rank: other ranks may have used it, so its place is sent as zeros
                local[slot.offset : slot.end].zero_()
        local[self._layout.numel :].zero_()
        rest = self._scale / self._early_scale
        self._factor = rest
        self._is_local = stays_local
        if stays_local:
            if rest * self._group.world_size != 1.0:
                local.mul_(rest * self._group.world_size)
            self._reduction = Pending()
            return
        reduction = self._policy.reduction
        if reduction.predivide != 1.0 and self._group.process_group is not None:
            local.mul_(1.0 / reduction.predivide)
            rest *= reduction.predivide
        with observe.unit_span("reduction", self._label):
            self._reduction = self._started(local, self._sent(local), rest)

    def _started(self, local: Tensor, sent: Tensor, scale: float) -> Pending:
        """Start the collective that sums `sent`, times `scale`, to where the sum is kept."""
        scatters = self._policy.reduction.scatters
        if self._is_kept_whole and (self._is_whole or not scatters):
            return collectives.all_reduce(self._reductions, local, scale, sent=sent)
        if not scatters:
            self._arriving = self._group.buffers.borrow(local.numel(), torch.float32)
            return collectives.all_reduce(self._reductions, self._arriving, scale, sent=sent)
        output = self.owned_grad
        if self._owned_holds_sum or self._leaves:
            self._arriving = output = self._group.buffers.borrow(len(self._owned), torch.float32)
        return collectives.reduce_scatter(self._reductions, sent, output, scale)

    def reduce_late(self) -> None:
        """Start adding the gradients that came too late to the sum, which must have ended.

        Every rank must call it in the same order, also one that has no such gradients.
        """
        if self._is_kept_whole:
            self._reopen()
        self._num_backwards += 1
        self._is_sent = False
        for index in range(len(self._params)):
            self.take(index)
        self.start_reduction()

    def _sent(self, local: Tensor) -> Tensor:
        """Return what travels: `local`, or a copy of it in the wire's dtype."""
        precision = self._policy.precision
        is_lossless = self._num_backwards == 1 and local.dtype == torch.float32
        if self._group.process_group is None or self._wire_dtype == local.dtype:
            return local
        if precision.wire_dtype is None and not is_lossless:
            return local
        self._wire = self._group.buffers.borrow(local.numel(), self._wire_dtype)
        return self._wire.copy_(local)

    def _reopen(self) -> None:
        """Turn the sum over ranks back into something to add to: a further backward comes before the step.

        What is left on each rank is such that the next sum over the ranks counts the gradients so far once.
        """
        if self._local is None:
            return
        if self._is_whole:
            self._local.mul_(1.0 / (self._factor * self._group.world_size))
        else:
            self._local[: self._owned.start].zero_()
            self._local[self._owned.stop :].zero_()
            self.owned_grad.mul_(1.0 / self._factor)
        self._filled = [True] * len(self._filled)
        self._num_backwards = 1
        self.state = check_transition(self.state, UnitState.ACCUMULATING)

    def advance_reduction(self) -> None:
        """Wait for the phase under way and start the next one, where there is one."""
        if self._reduction is not None:
            with observe.unit_span("wait for the reduction", self._label):
                self._reduction = self._reduction.advance()
            self._give_wire_back()  # what was sent has been added: the sum itself is on its way now

    def finish_reduction(self, *, measure: bool = False) -> None:
        """Wait for the sum and give temporary buffers back. measure: sum its squares while the sum is in the cache."""
        if self._reduction is None:
            return
        with observe.unit_span("wait for the reduction", self._label):
            self._reduction.wait()
        self._reduction = None
        self.state = check_transition(self.state, UnitState.REDUCED)
        self._filled = [False] * len(self._filled)
        self._num_backwards = 0
        kept = self.owned_grad if self._arriving is None else self._keep(self._arriving)
        if measure:
            self._square = self._measured(kept)
        if self.home_grad is not self.owned_grad:
            self._send_home(self.owned_grad)
        if self._arriving is not None:
            self._group.buffers.give_back(self._arriving)
            self._arriving = None
        self._give_wire_back()
        if not self._is_kept_whole:
            self._owned_holds_sum = True
            self._give_local_back()

    def settle(self) -> None:
        """Wait until `owned_grad` can be read and written by the host, wherever it is kept."""
        self.finish_reduction()
        self._link.synchronize()

    def _keep(self, arrived: Tensor) -> Tensor:
        """Add what has arrived to what the owner keeps; return the sum, on the device."""
        if len(arrived) != len(self.owned_grad):
            arrived = arrived[self._owned.start : self._owned.stop]
        if not self._leaves:
            return (self.owned_grad.add_ if self._owned_holds_sum else self.owned_grad.copy_)(arrived)
        if self._owned_holds_sum:
            if self.swap is not None:
                self.swap.bring_in()
            arrived.add_(self._link.on_device(self.owned_grad))
        kept = arrived.to(self.owned_grad.dtype)  # rounded before it is measured, as where it stays on the device
        self._send_home(kept)
        return kept

    def _send_home(self, grad: Tensor) -> None:
        if self.swap is None:
            self._link.copy(self.home_grad, grad)
            return
        self.swap.bring_in(reads=False)
        self._link.copy(self.home_grad, grad)
        self._link.synchronize()
        self.swap.send_out()

    @property
    def square(self) -> Tensor:
        """The sum of squares of this rank's share of the gradient, scalar fp64: all ranks' add up to the whole.

        Where every rank has its own gradient the whole is their mean square, which no norm of their mean exceeds.
        """
        if self._square is None:
            self.settle()
            if self.swap is not None and self._leaves:
                self.swap.bring_in()
            self._square = self._measured(self.owned_grad).to(self._group.device)
            if self.swap is not None and self._leaves:
                self.swap.drop()
        return self._square

    def _measured(self, grad: Tensor) -> Tensor:
        if self._is_local:
            return sum_of_squares(grad) / self._group.world_size
        return sum_of_squares(grad[self._counted])

    def hand_over(self) -> Tensor:
        """Return the gradient in `home_grad`; the next one comes into other memory, the one after into this again."""
        self._is_handed_over = True
        return self.home_grad

    def note_written(self) -> None:
        """Take over that `owned_grad` was written from elsewhere."""
        self._square = None
        if self.home_grad is not self.owned_grad:
            self._send_home(self.owned_grad)

    def _give_wire_back(self) -> None:
        if self._wire is not None:
            self._group.buffers.give_back(self._wire)
            self._wire = None

    def _give_local_back(self) -> None:
        if self._local is not None:
            self._group.buffers.give_back(self._local)
            self._local = None

    def discard(self) -> None:
        """Forget all gradients; the next backward overwrites the buffers."""
        self.finish_reduction()
        if not self._is_kept_whole:
            self._give_local_back()
        if self.swap is not None:
            self.swap.drop()
        self._filled = [False] * len(self._filled)
        self.used = [False] * len(self.used)
        self._num_backwards = 0
        self._owned_holds_sum = False
        self._square = None
        self.drop_late()
        self._is_sent = False
        self.state = check_transition(self.state, UnitState.IDLE)
