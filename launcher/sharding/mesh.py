"""The axes of a mesh of ranks, and which ranks are neighbours along them.

Axes stand from the outermost to the innermost: neighbours along the last axis are neighbours in rank, so that the axis
that communicates most, the tensor axis, stays within a node (Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", https://arxiv.org/abs/2104.04473, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

AXES = ("pipeline", "data", "sequence", "tensor")
_MAX_GROUPS, _MAX_RANKS = 4, 4  # that are shown of an axis, and of a group


@dataclass(frozen=True)
class MeshSizes:
    """How many ranks there are along each axis."""

    data: int  # different samples
    pipeline: int = 1  # different layers
    sequence: int = 1  # different parts of one sequence
    tensor: int = 1  # different parts of one layer
    expert: int = 1  # of the data axis, neighbours that have one set of experts together; divides `data`

    @property
    def world_size(self) -> int:
        """All ranks."""
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def model_size(self) -> int:
        """Ranks that work on the same samples together."""
        return self.world_size // self.data

    @property
    def is_data_alone(self) -> bool:
        """Whether every rank has its own samples and the whole model."""
        return self.model_size == 1 and self.expert == 1

    @property
    def num_replicas(self) -> int:
        """Ranks with the same part of the model: gradients are summed, and states sharded, over these."""
        return self.data * self.sequence

    @property
    def num_model_parts(self) -> int:
        """Ranks that have one copy of the model together."""
        return self.pipeline * self.tensor

    @property
    def equation(self) -> str:
        """The equation, with the axes that have more than one rank."""
        return f"{product_text(self.shape, expert=self.expert)} = {self.world_size}"

    def text(self, hosts: Sequence[str] = ()) -> str:
        """Return the equation, and for each axis which ranks are neighbours along it.

        hosts: of all ranks, in their order. Where there are several, the text says which axes stay within one.
        """
        groups = {axis: self.ranks_along(axis) for axis, size in zip(AXES, self.shape, strict=True) if size > 1}
        if self.expert > 1:
            groups["expert"] = self.ranks_of_experts()
        axes = [f"{axis} {_groups_text(ranks)}{_span_text(ranks, hosts)}" for axis, ranks in groups.items()]
        return "; ".join([f"{self.equation} ranks", *axes, *_hosts_text(hosts)])

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the place of a rank along each of AXES."""
        found = []
        for size in reversed(self.shape):
            rank, place = divmod(rank, size)
            found.append(place)
        return tuple(reversed(found))

    def ranks_along(self, *axes: str) -> list[list[int]]:
        """Return the groups of ranks that differ along `axes` alone, in the order of their first ranks."""
        fixed = [position for position, axis in enumerate(AXES) if axis not in axes]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            places = self.coordinates(rank)
            found.setdefault(tuple(places[position] for position in fixed), []).append(rank)
        return list(found.values())

    def ranks_of_experts(self) -> list[list[int]]:
        """Return the groups of ranks that have one set of experts together: neighbours along the data axis."""
        size = self.expert
        return [
            ranks[start : start + size] for ranks in self.ranks_along("data") for start in range(0, len(ranks), size)
        ]

    def ranks_of_replicas(self) -> list[list[int]]:
        """Return the groups of ranks that have the same experts."""
        return [ranks[first :: self.expert] for ranks in self.ranks_along("data") for first in range(self.expert)]


def product_text(shape: Sequence[int], *, expert: int = 1) -> str:
    """Return the left side of the equation, with the axes that have more than one rank.

    shape: in the order of AXES. expert: ranks of the data axis that have one set of experts together.
    """
    names = {axis: axis for axis in AXES}
    if expert > 1:
        names["data"] = f"data, experts over {expert}"
    return " × ".join(
        f"{size} ({names[axis]})" for size, axis in zip(shape, AXES, strict=True) if size > 1 or axis == "data"
    )


def _span_text(groups: list[list[int]], hosts: Sequence[str]) -> str:
    """Return over how many hosts groups of ranks are; nothing where there is one host."""
    if len(set(hosts)) < 2:
        return ""
    most = max(len({hosts[rank] for rank in ranks}) for ranks in groups)
    return " (each on one host)" if most == 1 else f" (over {most} hosts)"


def _hosts_text(hosts: Sequence[str]) -> list[str]:
    """Return which ranks each host has; nothing where there is one host."""
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    if len(ranks_of) < 2:
        return []
    shown = [f"{host} {_shown(ranks)}" for host, ranks in list(ranks_of.items())[:_MAX_GROUPS]]
    more = f" and {len(ranks_of) - _MAX_GROUPS} more" if len(ranks_of) > _MAX_GROUPS else ""
    return [f"hosts {' | '.join(shown)}{more}"]


def _groups_text(groups: list[list[int]]) -> str:
    more = f" and {len(groups) - _MAX_GROUPS} more" if len(groups) > _MAX_GROUPS else ""
    return " | ".join(map(_shown, groups[:_MAX_GROUPS])) + more


def _shown(ranks: list[int]) -> str:
    if len(ranks) <= _MAX_RANKS:
        return ",".join(map(str, ranks))
    stride = ranks[1] - ranks[0]
    return f"{ranks[0]}-{ranks[-1]}" + (f" by {stride}" if stride > 1 else "")
