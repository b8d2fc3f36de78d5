"""One unit's storage: parameters as views of a flat buffer, fp32 master, fp32 gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from launcher.comm.collectives import all_gather, all_reduce, reduce_scatter
from launcher.zero.layout import UnitLayout
from launcher.zero.stages import StagePolicy


class FlatUnit:
    """Parameters that communicate together. The user keeps the original `nn.Parameter` objects."""

    def __init__(
        self, layout: UnitLayout, params: Mapping[str, torch.nn.Parameter], policy: StagePolicy, rank: int
    ) -> None:
        self.layout, self.policy, self.rank = layout, policy, rank
        self.params = [params[slot.spec.name] for slot in layout.slots]
        first = self.params[0]
        self.flat = torch.zeros(layout.padded_numel, dtype=first.dtype, device=first.device)  # 1D
        for slot, param in zip(layout.slots, self.params, strict=True):
            view = self.flat[slot.start : slot.stop].view(param.shape)
            view.copy_(param.detach())
            param.data = view
        own = self.own_slice(self.flat) if policy.shard_optimizer else self.flat
        # fp32 parameters are their own master: no second copy.
        self.master = own if own.dtype == torch.float32 else own.float()
        self.full_grad: torch.Tensor | None = None  # 1D fp32; absent between steps
        self.grad: torch.Tensor | None = None  # 1D fp32, same elements as `master`

    def own_slice(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of a whole buffer."""
        return buffer.view(self.layout.world_size, -1)[self.rank]

    def collect(self) -> None:
        """Move the parameters' gradients into the flat fp32 gradient; absent ones count as zero."""
        if self.full_grad is None:
            self.full_grad = torch.zeros(
                self.layout.padded_numel, dtype=torch.float32, device=self.flat.device
            )
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            if param.grad is not None:
                self.full_grad[slot.start : slot.stop].add_(param.grad.reshape(-1))
                param.grad = None
        if self.policy.shard_gradients:
            self._scatter()

    def finish_gradients(self) -> None:
        """Make `grad` the mean over ranks; all ranks call, once per optimizer step, after `collect`."""
        if self.full_grad is not None and self.policy.shard_optimizer:
            self._scatter()
        elif self.full_grad is not None:
            all_reduce(self.full_grad)
            self.grad, self.full_grad = self.full_grad, None
        if self.grad is not None:
            self.grad.div_(dist.get_world_size())

    def write_back(self) -> None:
        """Publish the updated master to the parameters of all ranks, then drop the gradient."""
        target = self.own_slice(self.flat) if self.policy.shard_optimizer else self.flat
        if target.data_ptr() != self.master.data_ptr():
            target.copy_(self.master)
        if self.policy.shard_optimizer:
            all_gather(self.flat, target).wait()
        self.grad = None

    def _scatter(self) -> None:
        if self.full_grad is None:
            return
        reduced = torch.empty(self.layout.shard_numel, device=self.flat.device)
        reduce_scatter(reduced, self.full_grad).wait()
        self.grad = reduced if self.grad is None else self.grad.add_(reduced)
        self.full_grad = None  # the whole gradient never outlives its reduction
