"""Adam and AdamW over flat shards, on torch's fused kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from launcher.optim.api import FlatShard

# Hyper-parameters a group may carry; everything else in a group is the user's own business.
OPTIONS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")


class FusedAdam:
    """One torch optimizer whose parameters are the flat shards themselves."""

    def __init__(
        self, shards: list[FlatShard], param_groups: list[dict[str, Any]], *, decoupled_weight_decay: bool
    ) -> None:
        """param_groups: every option of `OPTIONS` and the user's `params`; becomes `self.param_groups`."""
        self.param_groups = param_groups
        self._name = "AdamW" if decoupled_weight_decay else "Adam"
        inner_groups: list[dict[str, Any]] = []
        self._inner_to_outer: list[int] = []
        for number, group in enumerate(param_groups):
            masters = [_as_parameter(shard) for shard in shards if shard.group == number]
            if masters:  # a rank may own nothing of a small group
                inner_groups.append({"params": masters} | {k: group[k] for k in OPTIONS if k in group})
                self._inner_to_outer.append(number)
        kind = torch.optim.AdamW if decoupled_weight_decay else torch.optim.Adam
        self._inner = kind(inner_groups, fused=True) if inner_groups else None

    @property
    def label(self) -> str:
        return f"{self._name}[torch fused]"

    def step(self) -> None:
        """Update every shard from its gradient."""
        if self._inner is None:
            return
        for inner, number in zip(self._inner.param_groups, self._inner_to_outer, strict=True):
            inner.update({key: self.param_groups[number][key] for key in OPTIONS if key in self.param_groups[number]})
        self._inner.step()

    def state_numel(self) -> int:
        """Return how many elements of optimizer state this rank holds (step counters left out)."""
        if self._inner is None:
            return 0
        states = (value for state in self._inner.state.values() for value in state.values())
        return sum(value.numel() for value in states if isinstance(value, Tensor) and value.dim() > 0)


def _as_parameter(shard: FlatShard) -> Tensor:
    master = shard.master.detach()
    master.requires_grad_(False)
    master.grad = shard.grad
    return master
