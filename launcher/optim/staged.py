"""Shards that are kept in 16 bits and updated in fp32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from launcher.comm.buffers import BufferPool
from launcher.optim.api import FlatOptimizer, ParamShard


class StagedFlat(FlatOptimizer):
    """An optimizer over fp32 copies that exist during the step only; its states stay fp32.

    What is kept between steps are the shards as given: masters, gradients, or both of them in 16 bits.
    """

    def __init__(
        self, shards: Sequence[ParamShard], pool: BufferPool, build: Callable[[list[ParamShard]], FlatOptimizer]
    ) -> None:
        self._pool = pool
        owned = [shard for shard in shards if shard.owned]
        self._masters = [(shard.master, _fp32_like(shard.master)) for shard in owned]
        self._grads = [(shard.grad, _fp32_like(shard.grad)) for shard in owned]
        # The copies share the states of the shards.
        copies = [
            replace(shard, master=master, grad=grad, param=None)
            for shard, (_, master), (_, grad) in zip(owned, self._masters, self._grads, strict=True)
        ]
        self._copy_of = dict(zip(owned, copies, strict=True))
        self._inner = build(copies)
        for kept, copy in (*self._masters, *self._grads):
            if copy is not kept:
                copy.untyped_storage().resize_(0)
        super().__init__(self._inner.name, shards, self._inner.param_groups)

    @property
    def label(self) -> str:
        return self._inner.label

    def step(self, grad_scale: float = 1.0, unused: Collection[str] = ()) -> None:
        """Update every shard from its gradient times `grad_scale`, except those of `unused` parameters."""
        staged = [(kept, copy) for kept, copy in (*self._masters, *self._grads) if copy is not kept]
        for kept, copy in staged:
            self._pool.lend(copy.untyped_storage(), kept.numel() * copy.itemsize)
            copy.copy_(kept)
        self._inner.step(grad_scale, unused)
        for kept, copy in self._masters:
            if copy is not kept:
                kept.copy_(copy)
        for _, copy in staged:
            self._pool.take_back(copy.untyped_storage())

    def room_of(self, shard: ParamShard, name: str) -> Tensor | None:
        """Return the memory that a state by element will have, 1-D; None where that is not known yet."""
        return self._inner.room_of(self._copy_of[shard], name)

    def load_state(self, shard: ParamShard, state: Mapping[str, Any]) -> None:
        """Replace the state of a shard by a copy of `state`, of the same elements."""
        self._inner.load_state(self._copy_of[shard], state)


def _fp32_like(kept: Tensor) -> Tensor:
    return kept if kept.dtype == torch.float32 else torch.empty_like(kept, dtype=torch.float32)
