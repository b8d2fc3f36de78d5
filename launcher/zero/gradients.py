"""The gradients of a unit on one rank, from autograd to their owner's sum: one state, and the reduction in flight.

[Note: the stream of reductions] On a GPU a reduction is started on a stream of its own (`Side.REDUCE`), which waits for
the computing once, for the gradients. All that follows runs there: waiting for NCCL, scaling, adding to the sum of
earlier micro-batches, the norm, the copy to host memory. The computing waits for it in two places only:

* where it is lent the memory of a gradient buffer that reductions have had (see "memory and streams" in
  `comm.buffers`): that bounds how far it runs ahead;
* where it reads the sums: before the optimizer (`GradientReducer.wait`), and when one is read earlier.

What reductions write, the computing has read before it starts the next one, for which they wait.

[Note: memory of sums] Activations are largest at the end of forward, which needs no sums of gradients: in a 16-bit run
these are 4 of 18 bytes a parameter. On a GPU a unit's sum has memory from its first use in a backward to the end of the
step. What is asked later, which gradient was not finite, is found in the step (`Kernel.measure`). A sum keeps its
memory on a CPU, where new pages are dear; where `param.grad` shows it, of which a script may hold views; and where the
host takes part in the step, as with LAMB: it reads sums after it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from launcher.comm import observe
from launcher.comm.buffers import LentTensor
from launcher.comm.groups import RankGroup
from launcher.comm.mesh import ParallelMesh
from launcher.comm.pending import Pending
from launcher.comm.streams import Side, StreamEvent
from launcher.config.policies import DType, ZeroPolicy
from launcher.sharding.layout import UnitLayout
from launcher.zero.disk import Swapped
from launcher.zero.local_gradients import LocalGradients
from launcher.zero.marks import is_copy
from launcher.zero.owned_gradient import OwnedGradient, sum_of_squares
from launcher.zero.placement import Placement
from launcher.zero.states import TORCH_DTYPES, UnitState, check_transition
from launcher.zero.tensors import digest

# ---- What a unit's gradients are while they travel between ranks: their type, and the factors of the average ----


class GradientCodec:
    """Turns the gradients of one unit into what a reduction sends.

    What travels is what autograd made: a 16-bit gradient of one micro-batch is sent in 16 bits, which loses nothing;
    only a sum of several micro-batches is sent in fp32. A policy may name the type that travels.
    """

    def __init__(self, policy: ZeroPolicy, group: RankGroup, num_ranks: int) -> None:
        """group: over which the gradients are reduced. num_ranks: over which they are averaged."""
        self._policy = policy
        self._group = group
        self._is_alone = group.process_group is None
        self.dtype = TORCH_DTYPES[policy.precision.wire or policy.precision.param]
        self.scale = policy.reduction.factor(num_ranks)  # of the sum, for the average
        self._encoded: Tensor | None = None  # 1-D [padded], in flight

    @property
    def exact_scale(self) -> float:
        """The factor of the average if gradients may be multiplied by it as they are taken, which rounds nothing; or 1.

        It saves a pass over the buffer. A power of two is exact in fp32 and bf16; fp16 would underflow.
        """
        is_exact = math.frexp(self.scale)[0] == 0.5
        is_wide = self._policy.precision.grad is DType.FP32 and self.dtype != torch.float16
        return self.scale if is_exact and is_wide and self._policy.reduction.predivide == 1.0 else 1.0

    @property
    def sends_what_autograd_makes(self) -> bool:
        """Whether 16-bit gradients of a single backward can be collected in what is sent.

        Through the 32-bit sum they would cost two further passes. Without overlap the buffers of all units would be
        needed at once.
        """
        precision = self._policy.precision
        is_narrow = precision.wire is None and precision.param is not precision.grad
        is_plain = self._policy.overlap_comm and self._policy.reduction.predivide == 1.0
        return is_narrow and is_plain and not self._is_alone

    def divide_before(self, local: Tensor, scale: float) -> float:
        """Take what the policy divides by before sending off `local`; return what is left of `scale` for the sum."""
        predivide = self._policy.reduction.predivide
        if predivide == 1.0 or self._is_alone:
            return scale
        local.mul_(1.0 / predivide)
        return scale * predivide

    def encode(self, local: Tensor, *, num_backwards: int) -> Tensor:
        """Return what travels: `local` (1-D [padded]), or a copy in another type, which lasts until `release`.

        num_backwards: whose gradients are summed in `local`.
        """
        is_lossless = num_backwards == 1 and local.dtype == torch.float32
        if self._is_alone or self.dtype == local.dtype:
            return local
        if self._policy.precision.wire is None and not is_lossless:
            return local
        self._encoded = self._group.buffers.borrow(local.numel(), self.dtype)
        return self._encoded.copy_(local)

    def release(self) -> None:
        """Give the copy back, when it has been sent and added."""
        if self._encoded is not None:
            self._group.buffers.give_back(self._encoded)
            self._encoded = None


# ---- The gradients of a unit on one rank ----


class UnitGradients:
    """Collects, reduces and holds the gradients of one unit.

    Sums over micro-batches are fp32 unless the policy says otherwise; sums over ranks are fp32 on gloo, and on NCCL in
    the type that travels: see `GradientCodec`. keeps_16_bits: whether the optimizer reads an offloaded sum as it was
    taken: see [Note: 16-bit sums in host memory].
    """

    keeps_16_bits = False

    def __init__(
        self,
        params: list[nn.Parameter],
        layout: UnitLayout,
        policy: ZeroPolicy,
        mesh: ParallelMesh,
        owned: range,
        *,
        placement: Placement,
        label: str,
    ) -> None:
        """placement: where the optimizer updates the unit. label: of the unit, for profilers and the debug log."""
        self._label = label
        self.place = placement.place
        self._layout = layout
        self._policy = policy
        self._group = group = mesh.shard
        self._reductions = group.reduce_group
        self._streams = group.streams
        self._replicate = mesh.replicate
        self._num_copies = mesh.num_copies
        self._owned = owned
        self._owns_all = len(owned) == layout.padded_numel
        self._codec = GradientCodec(policy, group, mesh.num_sample_ranks)
        self.state = UnitState.IDLE
        offloads_sums = placement.is_offloaded and policy.stage.shards_gradients  # as soon as it is summed
        self._is_kept_full = not offloads_sums and (self._owns_all or not policy.stage.shards_gradients)
        # Of gradients as they are taken. Nothing on a GPU: NCCL takes the mean itself.
        self._early_scale = 1.0 if group.runtime.is_async_device else self._codec.exact_scale
        self._sends_what_autograd_makes = self._is_kept_full and self._codec.sends_what_autograd_makes
        sum_dtype = TORCH_DTYPES[policy.precision.grad]
        # 1-D in the type of sums: [padded] where all of it is kept until the step, else [owned].
        kept: LentTensor | None = None
        if self._is_kept_full or not offloads_sums:
            kept = LentTensor(layout.padded_numel if self._is_kept_full else len(owned), sum_dtype, group.buffers)
        self._memory = kept
        self._full = full = kept.tensor if kept is not None and self._is_kept_full else None
        self._local = LocalGradients(
            params,
            layout,
            group.buffers,
            dtype=self._codec.dtype,
            kept=kept if self._is_kept_full else None,
            scale=self._early_scale,
            moves_together=group.streams.is_async,
        )
        own_sum = None if kept is None else kept.tensor
        if full is not None:
            own_sum = full[owned.start : owned.stop]
        turns = policy.offload.is_delayed
        self._sum = OwnedGradient(len(owned), sum_dtype, group, placement, kept=own_sum, turns=turns)
        self._arriving: Tensor | None = None  # the sum of a further micro-batch: 1-D [owned], or [padded] of all ranks
        self._reduction: Pending | None = None
        self._is_sent = False  # the sum of the current backward was begun
        self._factor = 1.0  # what the last sum over the ranks was multiplied by
        self._is_summed_over_copies = mesh.replicate is None  # what is owned
        self._is_unreduced = False  # the last reduction left every rank its own gradient
        # Of what is owned: each element is counted by one rank.
        own = layout.chunk_range(group.rank) if self._owns_all else owned
        counts_whole = mesh.tensor is None or mesh.tensor.rank == 0
        counted = [own]
        if not counts_whole or any(map(is_copy, params)):
            counted = _counted_ranges(params, layout, own, counts_whole=counts_whole)
        self._counted = [slice(part.start - owned.start, part.stop - owned.start) for part in counted]
        self._square: Tensor | None = None  # scalar fp64: the sum of squares, when it is known
        # Views of it are what `param.grad` is after a pass before a step: users may write into them.
        self.is_shown = self._owns_all and full is not None and self._sum.optimizer_grad is self._sum.grad
        self.is_shown = self.is_shown and all(param.dtype == sum_dtype for param in params)
        self._is_measured_early = not (group.runtime.is_async_device or self.is_shown) or offloads_sums
        self._is_written_early = False  # to `param.grad`, before a further backward
        self._is_handed_out = False  # the sum, to a script: it may have written there since
        has_copies = any(map(is_copy, params))  # other ranks may measure them
        self._lends_sum = not (placement.is_offloaded or self._is_measured_early or self.is_shown or has_copies)

    @property
    def owned_grad(self) -> Tensor:
        """The sum of what this rank owns, 1-D [owned], where it is added up. To be read: see `widened_grad`."""
        return self._sum.grad

    def widened_grad(self) -> Tensor:
        """Return the same, in memory, in the type of sums: to be written."""
        return self._sum.widened()

    @property
    def optimizer_grad(self) -> Tensor:
        """The same, 1-D [owned], where the optimizer reads it."""
        return self._sum.optimizer_grad

    def buffers(self) -> list[Tensor]:
        """Return the memory of sums that lasts from step to step."""
        return ([] if self._full is None else [self._full]) + self._sum.buffers()

    def give_sum_back(self) -> None:
        """Leave the sum without memory until the next one, where that may be: see [Note: memory of sums]."""
        if self._lends_sum and self._memory is not None:
            self._memory.give_back()

    def hand_out(self) -> Tensor:
        """Return the sum, 1-D [owned], for a script that may write it before the step, and read it after the step.

        On disk it is for reading alone. The sum keeps its memory from now on.
        """
        self._lends_sum, self._is_handed_out = False, True
        return self.widened_grad() if self.swap is None else self.owned_grad

    @property
    def has_sum(self) -> bool:
        """Whether there are values of the sum, in memory or on disk."""
        return self._memory is None or self._memory.has_memory

    @property
    def arrival(self) -> StreamEvent:
        """The point at which `optimizer_grad` has what the last finished reduction has brought."""
        return self._sum.stored

    @property
    def swap(self) -> Swapped | None:
        """What of it is on disk between its uses."""
        return self._sum.swap

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters, by slot."""
        return tuple(self._layout.names)

    @property
    def used(self) -> list[bool]:
        """Which parameters had a gradient on this rank since the last step, by slot."""
        return self._local.used

    # ---- from autograd ----

    def begin_backward(self, *, is_reduced: bool, factor: float = 1.0) -> None:
        """Forget which gradients of the previous backward have arrived. is_reduced: what this one leaves, and alone.

        factor: what gradients of this one are multiplied by.
        """
        if self._is_kept_full and self.state is UnitState.REDUCED:
            self._unreduce()
        self._sum.begin_backward()
        self._local.begin_backward(is_outgoing=is_reduced and self._sends_what_autograd_makes, factor=factor)
        self._is_written_early = bool(self._local.written)
        self._is_handed_out = False  # what was written is added to: it is measured and copied with the new sum
        self._square = None
        self._is_sent = False

    @property
    def is_complete(self) -> bool:
        """Whether every parameter's gradient of this backward has arrived, at least once."""
        return self._local.is_complete

    @property
    def has_late(self) -> bool:
        """Whether gradients came after the sum was begun. They wait in `param.grad`, where later ones are added."""
        return self._is_sent and self._local.has_untaken

    def take(self, index: int) -> None:
        """Take the gradient autograd left on parameter `index` over.

        After the sum was begun it stays where it is, and autograd adds further ones to it: see `reduce_late`.
        """
        if not self._is_sent:
            self.state = check_transition(self.state, UnitState.ACCUMULATING)
            self._local.take(index)

    def local_gradient(self, index: int) -> Tensor:
        """Return this rank's own gradient of parameter `index` so far, 1-D, to be written: no reduction has begun.

        Zeros where there is none; from now on there is one.
        """
        self.state = check_transition(self.state, UnitState.ACCUMULATING)
        return self._local.gradient_of(index)

    def end_backward(self) -> None:
        """Move what this backward has left into the buffer, where no reduction does."""
        if not self._is_sent:
            self._local.move_all()

    def leave(self, *, shows: bool) -> None:
        """Leave in `param.grad` what users may find there: see `LocalGradients.leave`. shows: whether to leave any."""
        # A rank that is alone has nothing to wait for between micro-batches.
        is_whole = self.state is UnitState.REDUCED or (
            self._group.world_size == self._num_copies == 1 and self.state is UnitState.ACCUMULATING
        )
        whole = self._full if self.is_shown and is_whole and not self._is_unreduced else None
        self._local.leave(whole, shows=shows, shows_unused=self._group.world_size > 1)

    def withdraw(self) -> None:
        """Take what was left out of `param.grad`, and note what the user has written there."""
        self._local.withdraw()

    @property
    def has_written(self) -> bool:
        """Whether the user has written to `param.grad`, other than into a view of the gradient."""
        return self._local.has_written

    def written(self) -> list[tuple[float, float]]:
        """Return what every rank must have written alike, by parameter: what was done, and a digest of the value.

        It is (0, 0) where nothing was written, and (NaN, NaN) for what cannot count.
        """
        can_count = not (self._is_written_early or self._is_unreduced)
        found = [(0.0, 0.0)] * len(self._layout.slots)
        for index, grad in self._local.written.items():
            slot = self._layout.slots[index]
            if grad is None:
                found[index] = (1.0, 0.0)
            elif can_count and tuple(grad.shape) == tuple(slot.shape):
                found[index] = (2.0, digest(grad.to_dense()).item())
            else:
                found[index] = (math.nan, math.nan)
        return found

    def take_written(self) -> None:
        """Have the gradients that the user has written to `param.grad` replace the sums, which are complete."""
        self.finish()
        with self._sum.in_memory(writes=True):
            owned_grad = self.widened_grad()
            for index, grad in self._local.written.items():
                slot = self._layout.slots[index]
                owned = slot.within(self._owned)
                start = slot.offset + owned.start - self._owned.start
                part = owned_grad[start : start + len(owned)]
                if grad is None:
                    part.zero_()
                else:
                    part.copy_(grad.detach().to_dense().reshape(-1)[owned.start : owned.stop])
                self._local.used[index] = grad is not None
        self._local.written.clear()
        self.invalidate_norm()

    def drop(self, index: int) -> bool:
        """Forget the gradient autograd left on parameter `index`. Returns whether it is in the sum all the same."""
        is_in_sum = self._local.shows_sum(index)
        self._local.drop(index)
        return is_in_sum

    def drop_late(self) -> None:
        """Forget gradients that came after the sum was begun."""
        if self._is_sent:
            self._local.drop_untaken()

    # ---- over the ranks ----

    def start_reduction(self, *, is_last: bool, skips_reduction: bool = False) -> None:
        """Start summing, or averaging, the gradients over the ranks. Every rank must call it in the same order.

        is_last: before a step. Where there are several copies of the shards, their sums are added then.
        skips_reduction: send nothing; each rank keeps its own gradient, scaled so that their mean is that of the sum.
        """
        self.state = check_transition(self.state, UnitState.ACCUMULATING)
        self.state = check_transition(self.state, UnitState.REDUCING)
        self._is_sent = True
        local = self._local.completed()
        self._factor = remaining = self._codec.scale / self._early_scale
        self._is_unreduced = skips_reduction
        if skips_reduction:
            if remaining * self._group.world_size != 1.0:
                local.mul_(remaining * self._group.world_size)
            self._reduction = Pending()
            return
        remaining = self._codec.divide_before(local, remaining)
        if self._memory is not None:
            self._memory.borrow()
        ready = self._streams.record()
        with observe.unit_span("reduction", self._label), self._streams.on(Side.REDUCE):
            ready.wait()
            self._sum.start_fetch()
            sent = self._codec.encode(local, num_backwards=self._local.num_backwards)
            self._reduction = self._started(local, sent, remaining, is_last=is_last)

    def _started(self, local: Tensor, sent: Tensor, scale: float, *, is_last: bool) -> Pending:
        """Start the collective that sums `sent`, times `scale`, to where the sum is kept."""
        scatters = self._policy.reduction.scatters
        if self._full is not None and (self._owns_all or not scatters):
            return self._reductions.communicator.all_reduce(self._full, scale, sent=sent)
        if scatters:
            output = self.owned_grad
            if self._sum.holds_sum or not self._sum.has_buffer:
                dtype = self._arriving_dtype(sent.dtype, scale)
                self._arriving = output = self._group.buffers.borrow(len(self._owned), dtype)
            pending = self._reductions.communicator.reduce_scatter(sent, output, scale)
        else:
            self._arriving = self._group.buffers.borrow(local.numel(), torch.float32)
            output = self._arriving[self._owned.start : self._owned.stop]
            pending = self._reductions.communicator.all_reduce(self._arriving, scale, sent=sent)
        # What is added to a sum over the copies must be one, too.
        if self._replicate is not None and (is_last or self._is_summed_over_copies):
            return pending.then(lambda: self._sum_over_copies(output))
        return pending

    def _arriving_dtype(self, dtype: torch.dtype, scale: float) -> torch.dtype:
        """Return the type in which a sum over the ranks arrives: 16 bits where it has no more, and nothing is added."""
        is_all = not (self._sum.holds_sum or self._sum.has_buffer) and self._replicate is None
        if self.keeps_16_bits and is_all:
            return self._reductions.communicator.sum_dtype(dtype, scale)
        return torch.float32

    def _sum_over_copies(self, output: Tensor) -> Pending:
        """Start adding the sums of all copies of the shards, with those of earlier micro-batches that were not yet."""
        assert self._replicate is not None
        if self._sum.holds_sum and not self._is_summed_over_copies:
            self._sum.add_to(output)
            self._sum.holds_sum = False
        self._is_summed_over_copies = True
        return self._replicate.communicator.all_reduce(output)

    def advance_reduction(self) -> bool:
        """Wait for the phase under way and start the next one; return whether there is one."""
        if self._reduction is None:
            return False
        with self._streams.on(Side.REDUCE):
            with observe.unit_span("wait for the reduction", self._label):
                self._reduction = self._reduction.advance()
            self._codec.release()  # what was sent has been added: the sum itself is in flight now
            self._local.empty()
        return not self._reduction.is_done

    def finish_reduction(self, *, measure: bool = False) -> None:
        """Wait for the sum and give temporary buffers back. measure: sum its squares while the sum is in the cache.

        On a GPU neither the host nor the computing waits: what is left to do is queued.
        """
        if self._reduction is None:
            return
        with self._streams.on(Side.REDUCE):
            self._finish_reduction(self._reduction, measure=measure)

    def _finish_reduction(self, reduction: Pending, *, measure: bool) -> None:
        with observe.unit_span("wait for the reduction", self._label):
            reduction.wait()
        self._reduction = None
        self.state = check_transition(self.state, UnitState.REDUCED)
        kept = self.owned_grad if self._arriving is None else self._kept(self._arriving)
        if measure and self._is_measured_early:
            self._square = self._measured(kept)
        self._sum.copy_to_optimizer()
        if self._arriving is not None:
            self._sum.give_back(self._arriving)
            self._arriving = None
        self._codec.release()
        self._local.empty()
        self._sum.holds_sum = not self._is_kept_full

    def _kept(self, arrived: Tensor) -> Tensor:
        """Add what has arrived to the owned sum; return the total on the device, which may be `arrived` itself."""
        owned = self._owned
        return self._sum.keep(arrived if len(arrived) == len(owned) else arrived[owned.start : owned.stop])

    # ---- before a step, and between backward passes of one step ----

    def complete_sum(self) -> None:
        """Add the sums of all copies of the shards, where the last backward did not know that a step follows."""
        if self._is_summed_over_copies or self._replicate is None or self.state is not UnitState.REDUCED:
            return
        total = self._group.buffers.borrow(len(self._owned), torch.float32).zero_()
        self._sum.holds_sum = True
        self._sum_over_copies(total).wait()
        self._kept(total)
        self._sum.copy_to_optimizer()
        self._sum.give_back(total)
        self._sum.holds_sum = not self._is_kept_full
        self._square = None

    @property
    def is_incomplete(self) -> bool:
        """Whether there are gradients that are not summed over all ranks, and wait for a step."""
        is_partial = self.state is UnitState.REDUCED and not self._is_summed_over_copies
        return is_partial or self.state is UnitState.ACCUMULATING

    def reduce_late(self) -> None:
        """Start adding the gradients that came too late to the sum, which must have ended.

        Every rank must call it in the same order, also one that has no such gradients.
        """
        if self._is_kept_full:
            self._unreduce()
        self._local.num_backwards += 1
        self._is_sent = False
        self.state = check_transition(self.state, UnitState.ACCUMULATING)
        self._local.withdraw()
        self._local.take_all()
        self._square = None
        self.start_reduction(is_last=True)

    def _unreduce(self) -> None:
        """Turn the sum over ranks back into something to add to: a further backward comes before the step.

        What is left on each rank is such that the next sum over the ranks counts the gradients so far once.
        """
        self._streams.join(Side.REDUCE)
        local = self._local.flat()
        factor = self._factor * (self._num_copies if self._is_summed_over_copies else 1)
        if self._owns_all:
            local.mul_(1.0 / (factor * self._group.world_size))
        else:
            local[: self._owned.start].zero_()
            local[self._owned.stop :].zero_()
            self.owned_grad.mul_(1.0 / factor)
        self._is_summed_over_copies = self._replicate is None
        self._local.resume()
        self.state = check_transition(self.state, UnitState.ACCUMULATING)

    @property
    def square(self) -> Tensor:
        """The sum of squares of this rank's share of the gradient, scalar fp64. Over all ranks it is its norm squared.

        Where every rank has its own gradient their sum is their mean square, which no norm of their mean exceeds.
        """
        if self._square is None:
            self.finish()
            square = self._sum.square([slice(None)] if self._is_unreduced else self._counted)
            self._square = square / self._group.world_size if self._is_unreduced else square
        return self._square

    @property
    def unmeasured(self) -> list[tuple[int, Tensor]] | None:
        """This rank's share of the gradient, 1-D each on the device, whose squares are summed with those of all units.

        With each is where in the owned range it begins.

        None: `square` has them. All reductions must have been waited for.
        """
        if self._is_measured_early or self._is_unreduced:
            return None
        return [(part.start, self.owned_grad[part]) for part in self._counted]

    def _measured(self, grad: Tensor) -> Tensor:
        is_full = self._is_unreduced
        return sum_of_squares(grad) / self._group.world_size if is_full else sum_of_squares(grad, self._counted)

    def finish(self) -> None:
        """Wait until `owned_grad` can be read and written, wherever it is kept."""
        self.finish_reduction()
        self._streams.join(Side.REDUCE)
        self._group.copier.synchronize()

    def take_handed_out(self) -> None:
        """Take over what a script may have written since the backward into the sum that `hand_out` gave it."""
        if self._is_handed_out:
            self.invalidate_norm()

    def invalidate_norm(self) -> None:
        """Take over that `owned_grad` was written from elsewhere."""
        self._square = None
        self._sum.copy_to_optimizer()

    def swap_optimizer_grad(self) -> Tensor:
        """Return `optimizer_grad`; the next gradient comes into other memory, the one after into this again."""
        return self._sum.swap_optimizer_grad()

    def discard(self) -> None:
        """Forget all gradients; the next backward overwrites the buffers."""
        self.finish_reduction()
        self._local.end_step()
        self._sum.end_step()
        self._is_summed_over_copies = self._replicate is None
        self._square = None
        self._is_handed_out = False
        self.drop_late()
        self._is_sent = False
        self.state = check_transition(self.state, UnitState.IDLE)


def _counted_ranges(params: list[nn.Parameter], layout: UnitLayout, own: range, *, counts_whole: bool) -> list[range]:
    """Return the elements that no other rank of this copy of the model counts.

    counts_whole: whether this rank counts what all tensor-parallel ranks have whole.
    """
    found: list[range] = []
    for slot, shared in layout.slots_in(own):
        if is_copy(params[slot.index]) or (slot.param.split is None and not counts_whole):
            continue
        if found and found[-1].stop == shared.start:
            found[-1] = range(found[-1].start, shared.stop)
        else:
            found.append(shared)
    return found
