"""How an optimizer updates flat shards: one protocol, whatever kernel is behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Whole:
    """A parameter of which ranks own parts."""

    shape: torch.Size
    parts: tuple[range, ...]  # the elements each rank owns, by rank: one after another, or everywhere all

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def is_split(self) -> bool:
        """Say whether each rank owns its own elements."""
        return len(self.parts) > 1 and sum(map(len, self.parts)) == self.numel


@dataclass(frozen=True)
class FlatShard:
    """A run of owned elements that belong to one optimizer group."""

    # 1-D, updated in place; fp32 unless masters are kept in 16 bits; a whole parameter in its own shape for optimizers
    # that need shapes.
    master: Tensor
    grad: Tensor  # same shape, fp32 unless sums are kept in 16 bits; what is in it after the step is undefined
    group: int
    unit: int = 0  # index of the unit it is part of
    start: int = 0  # of its first element, within the owned range of that unit
    param: Tensor | None = None  # same shape, the 16-bit copy of an fp32 master that the forward reads
    whole: Whole | None = None  # the parameter it is a part of, where shards are made parameter by parameter


# Elements of units whose parameters got no gradient on any rank: unit index -> ranges within its owned range.
Unused = Mapping[int, Sequence[range]]


# What happens before and after the update of one unit: within it the unit's masters, gradients and states are in place.
Around = Callable[[int], AbstractContextManager[None]]


def by_unit(shards: Sequence[FlatShard]) -> dict[int, list[int]]:
    """Return the places of the shards of each unit."""
    places: dict[int, list[int]] = {}
    for number, shard in enumerate(shards):
        places.setdefault(shard.unit, []).append(number)
    return places


@contextlib.contextmanager
def all_at_once(shards: Sequence[FlatShard], around: Around | None) -> Iterator[None]:
    """Have all units in place together, for an optimizer that cannot update one after another."""
    with contextlib.ExitStack() as stack:
        if around is not None:
            for unit in dict.fromkeys(shard.unit for shard in shards):
                stack.enter_context(around(unit))
        yield


@dataclass(frozen=True)
class StateRun:
    """Optimizer state of consecutive elements of one shard that have taken the same steps."""

    start: int  # within the shard
    stop: int
    state: dict[str, Any]  # name -> tensor of `stop - start` elements, or one value of the whole run such as `step`


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

    @property
    def writes_params(self) -> bool:
        """Say whether a step writes `FlatShard.param` too; else whoever reads it copies the master."""
        ...

    def step(self, unused: Unused | None = None, grad_scale: float = 1.0, around: Around | None = None) -> None:
        """Update every shard from its gradient times `grad_scale`, except the `unused` elements.

        around: entered for each unit, one after another where the optimizer can; else for all of them together.
        Those keep their values and states, weight decay and step counters included, as a parameter without
        gradient does in torch.
        """
        ...

    def state_numel(self) -> int:
        """Return how many elements of optimizer state this rank holds."""
        ...

    def sizes_of_states(self, shard: int) -> dict[str, int]:
        """Return the bytes of each state, by name, that a shard is going to have; empty where that is not known."""
        ...

    def states(self, shard: int) -> list[StateRun]:
        """Return the live states of one shard, in element order; runs that have not taken a step have none."""
        ...

    def state_dict(self, around: Around | None = None) -> dict[str, Any]:
        """Return hyper-parameters by group and states by shard.

        around: entered for each unit while its states are copied; None: tensors are live, not copies.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any], around: Around | None = None) -> None:
        """Continue from a state of `state_dict()`; its runs may be cut elsewhere. Tensors are copied.

        around: entered for each unit, as in `step`.
        """
        ...
