"""A flat unit: one buffer for the parameters that communicate together, and their gradients.

Users keep their `nn.Parameter`s; a unit only replaces the storage under them by views into its buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.comm import collectives
from launcher.comm.collectives import Pending
from launcher.comm.groups import DataParallelGroup
from launcher.zero.layout import UnitLayout
from launcher.zero.stages import UnitState, ZeroPolicy, check_transition


@dataclass
class UnitMembers:
    """The parameters of a unit, in layout order."""

    names: list[str]
    params: list[nn.Parameter]
    anchors: list[nn.Module]  # modules whose forward is the first to read the unit's parameters
    groups: list[int] = field(default_factory=list)  # optimizer group of each parameter


class FlatUnit:
    """Parameters, gradients and master weights of one unit on this rank.

    The owned range is the part this rank updates: the whole buffer at stage 0, one chunk from stage 1 on.
    """

    def __init__(self, members: UnitMembers, layout: UnitLayout, policy: ZeroPolicy, group: DataParallelGroup) -> None:
        self.members = members
        self.layout = layout
        self._policy = policy
        self._group = group
        sharded = policy.stage.shards_optimizer and group.process_group is not None
        self.owned = layout.chunk_range(group.rank) if sharded else range(layout.padded_numel)
        self.state = UnitState.IDLE
        self.flat = self._adopt_parameters()  # 1-D [padded], model precision
        owned_flat = self.flat[self.owned.start : self.owned.stop]
        # 1-D [owned], fp32. In fp32 the parameters are their own master: no second copy.
        self.master = owned_flat.float().clone() if policy.precision.has_master else owned_flat
        self._keeps_local_grad = not (sharded and policy.stage.shards_gradients)
        self._local_grad: Tensor | None = None  # 1-D [padded], fp32
        if self._keeps_local_grad:
            self._local_grad = self._new_gradient()
            self.owned_grad = self._local_grad[self.owned.start : self.owned.stop]  # 1-D [owned], fp32
        else:
            self.owned_grad = torch.zeros(len(self.owned), dtype=torch.float32, device=group.device)
        self._filled = [False] * len(layout.slots)  # has a gradient in the local buffer
        self._arrived = [False] * len(layout.slots)  # has a gradient of the current backward
        self._num_arrived = 0
        self._owned_grad_holds_sum = False  # stage 2: an earlier micro-batch is in `owned_grad`
        self._reduction: Pending | None = None
        self._gather: Pending | None = None

    def _adopt_parameters(self) -> Tensor:
        dtype = self._policy.precision.param_dtype
        flat = torch.zeros(self.layout.padded_numel, dtype=dtype, device=self._group.device)
        with torch.no_grad():
            for slot in self.layout.slots:
                param = self.members.params[slot.index]
                view = flat[slot.offset : slot.end].view(param.shape)
                view.copy_(param.data)
                param.data = view
                param.grad = None
        return flat

    def _new_gradient(self) -> Tensor:
        return torch.zeros(self.layout.padded_numel, dtype=torch.float32, device=self._group.device)

    # ---- backward ----

    def begin_backward(self) -> None:
        """Forget which gradients of the previous backward have arrived."""
        self._arrived = [False] * len(self._arrived)
        self._num_arrived = 0

    @property
    def is_complete(self) -> bool:
        """Say whether every parameter's gradient of this backward has arrived."""
        return self._num_arrived == len(self._arrived)

    def take_gradient(self, index: int) -> None:
        """Move the gradient autograd left on parameter `index` into the buffer, divided by the world size.

        Raises: EngineError when the unit's sum is on its way already.
        """
        param = self.members.params[index]
        if self.state is UnitState.REDUCING:
            raise EngineError(
                f"a second gradient of {self.members.names[index]} came in one backward pass",
                hint='set "overlap_comm": false; reentrant activation checkpointing does this',
            )
        self.state = check_transition(self.state, UnitState.ACCUMULATING)
        if self._local_grad is None:
            self._local_grad = self._new_gradient()
        slot = self.layout.slots[index]
        grad, param.grad = param.grad, None
        if grad is None:
            return
        if grad.is_sparse:
            grad = grad.to_dense()
        target = self._local_grad[slot.offset : slot.end].view(grad.shape)
        scale = 1.0 / self._group.world_size
        if self._filled[index]:
            target.add_(grad, alpha=scale)
        elif scale == 1.0:
            target.copy_(grad)
        else:
            torch.mul(grad, scale, out=target)
        self._filled[index] = True
        if not self._arrived[index]:
            self._arrived[index] = True
            self._num_arrived += 1

    def start_reduction(self) -> None:
        """Start summing this unit's gradients over the ranks. Every rank must call it in the same order."""
        if self._local_grad is None:
            self._local_grad = self._new_gradient()
        for slot, filled in zip(self.layout.slots, self._filled, strict=True):
            if not filled:  # unused on this rank: other ranks may have used it, so its place is sent as zeros
                self._local_grad[slot.offset : slot.end].zero_()
        self.state = check_transition(self.state, UnitState.ACCUMULATING)
        self.state = check_transition(self.state, UnitState.REDUCING)
        if len(self.owned) == self.layout.padded_numel:
            self._reduction = collectives.all_reduce(self._group, self._local_grad)
        else:
            own_chunk = self._local_grad[self.owned.start : self.owned.stop]
            self._reduction = collectives.reduce_scatter(self._group, self._local_grad, own_chunk)

    def finish_reduction(self) -> None:
        """Wait for the sum; at stage 2 add it to the owned gradient and free the local buffer."""
        if self._reduction is None:
            return
        self._reduction.wait()
        self._reduction = None
        self.state = check_transition(self.state, UnitState.REDUCED)
        self._filled = [False] * len(self._filled)
        if self._keeps_local_grad or self._local_grad is None:
            return
        own_chunk = self._local_grad[self.owned.start : self.owned.stop]
        if self._owned_grad_holds_sum:
            self.owned_grad.add_(own_chunk)
        else:
            self.owned_grad.copy_(own_chunk)
            self._owned_grad_holds_sum = True
        self._local_grad = None

    # ---- step and forward ----

    def discard_gradients(self) -> None:
        """Forget all gradients; the next backward overwrites the buffers."""
        self.finish_reduction()
        self._filled = [False] * len(self._filled)
        self._owned_grad_holds_sum = False
        self.state = check_transition(self.state, UnitState.IDLE)

    def publish_update(self) -> None:
        """Write the updated master range into the parameters and start gathering the other ranks' ranges."""
        if self._policy.precision.has_master:
            self.flat[self.owned.start : self.owned.stop].copy_(self.master)
        if len(self.owned) != self.layout.padded_numel:
            self._gather = collectives.all_gather(self._group, self.flat)

    def refresh_master(self) -> None:
        """Take the parameters' values as the new master values, after they were loaded from elsewhere."""
        if self._policy.precision.has_master:
            self.master.copy_(self.flat[self.owned.start : self.owned.stop])

    def wait_for_parameters(self) -> None:
        """Block until the parameters are those of the last step. Cheap when nothing is on its way."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None
