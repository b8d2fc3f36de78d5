"""Shards that are kept in 16 bits and updated in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from launcher.comm.buffers import BufferPool
from launcher.optim.api import Around, FlatOptimizer, FlatShard, StateRun, Unused, all_at_once


class StagedFlat:
    """An optimizer over fp32 copies that exist during the step only; its states stay fp32.

    What is kept between steps are the shards as given: masters, gradients, or both of them in 16 bits.
    """

    writes_params = False

    def __init__(
        self, shards: list[FlatShard], pool: BufferPool, build: Callable[[list[FlatShard]], FlatOptimizer]
    ) -> None:
        self._pool = pool
        self._shards = shards
        self._masters = [(shard.master, _fp32_like(shard.master)) for shard in shards]
        self._grads = [(shard.grad, _fp32_like(shard.grad)) for shard in shards]
        self._inner = build(
            [
                FlatShard(master, grad, shard.group, shard.unit, shard.start)
                for shard, (_, master), (_, grad) in zip(shards, self._masters, self._grads, strict=True)
            ]
        )
        for kept, copy in (*self._masters, *self._grads):
            if copy is not kept:
                copy.untyped_storage().resize_(0)

    @property
    def label(self) -> str:
        return self._inner.label

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._inner.param_groups

    def step(self, unused: Unused | None = None, grad_scale: float = 1.0, around: Around | None = None) -> None:
        """Update every shard from its gradient times `grad_scale`, except the `unused` elements."""
        with all_at_once(self._shards, around):
            self._step(unused, grad_scale)

    def _step(self, unused: Unused | None, grad_scale: float) -> None:
        staged = [(kept, copy) for kept, copy in (*self._masters, *self._grads) if copy is not kept]
        for kept, copy in staged:
            self._pool.lend(copy.untyped_storage(), kept.numel() * copy.itemsize)
            copy.copy_(kept)
        self._inner.step(unused, grad_scale)
        for kept, copy in self._masters:
            if copy is not kept:
                kept.copy_(copy)
        for _, copy in staged:
            self._pool.take_back(copy.untyped_storage())

    def state_numel(self) -> int:
        """Return how many elements of optimizer state this rank holds."""
        return self._inner.state_numel()

    def sizes_of_states(self, shard: int) -> dict[str, int]:
        """Return nothing: what states torch's classes make is known after their first step."""
        return {}

    def states(self, shard: int) -> list[StateRun]:
        """Return the live states of one shard, in element order."""
        return self._inner.states(shard)

    def state_dict(self, around: Around | None = None) -> dict[str, Any]:
        """Return hyper-parameters by group and states by shard."""
        return self._inner.state_dict(around)

    def load_state_dict(self, state: Mapping[str, Any], around: Around | None = None) -> None:
        """Continue from a state of `state_dict()`."""
        self._inner.load_state_dict(state, around)


def _fp32_like(kept: Tensor) -> Tensor:
    return kept if kept.dtype == torch.float32 else torch.empty_like(kept, dtype=torch.float32)
