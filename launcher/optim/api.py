"""How an optimizer updates flat shards: one protocol, whatever kernel is behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class FlatShard:
    """A run of owned elements that belong to one optimizer group."""

    master: Tensor  # 1-D fp32, updated in place
    grad: Tensor  # 1-D fp32, same numel; read by the step
    group: int


class FlatOptimizer(Protocol):
    """Updates flat shards in place; holds the states of this rank's shards only."""

    @property
    def label(self) -> str:
        """Name and kernel for the start line, such as `AdamW[torch fused]`."""
        ...

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Live hyper-parameters, one dict a group; what is written here holds from the next step on."""
        ...

    def step(self) -> None:
        """Update every shard from its gradient."""
        ...

    def state_numel(self) -> int:
        """Return how many elements of optimizer state this rank holds."""
        ...
