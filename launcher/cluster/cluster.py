"""Hosts, slots and ranks as immutable data.

A `Cluster` says what may be used; a `Placement` says which rank runs where. Both are values: they are
printed by `--dry-run`, sent to agents, and compared in tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

# A number beyond these is a typo, and must not eat the memory.
MAX_SLOTS = 1_024  # of one host; no machine has more devices
MAX_EXPANSION = 65_536  # hosts of one expression or file, such as [1-99999999]


@dataclass(frozen=True)
class Host:
    """One machine of a hostfile."""

    name: str  # as the user wrote it, without user and port: "node-a", "10.0.0.1", "::1"
    slots: tuple[int, ...]  # device indices that may be used, ascending
    user: str | None = None  # SSH user, None = ~/.ssh/config or the current user
    port: int | None = None  # SSH port, None = ~/.ssh/config or 22


@dataclass(frozen=True)
class Cluster:
    """Hosts in hostfile order, which is the order of node ranks."""

    hosts: tuple[Host, ...]

    @property
    def num_slots(self) -> int:
        return sum(len(host.slots) for host in self.hosts)


@dataclass(frozen=True)
class NodeRange:
    """How many nodes a job takes: `most` where there are as many, and no fewer than `least`."""

    least: int
    most: int

    @property
    def is_elastic(self) -> bool:
        return self.least < self.most

    def of(self, num_hosts: int) -> int:
        """Return how many of so many hosts are taken; `least` where that is too few."""
        return max(self.least, min(self.most, num_hosts))

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.is_elastic else str(self.most)


@dataclass(frozen=True)
class NodePlacement:
    """The ranks of one node: `first_rank` .. `first_rank + len(slots) - 1`, one per slot."""

    node_rank: int
    host: Host
    first_rank: int

    @property
    def num_ranks(self) -> int:
        return len(self.host.slots)

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)


@dataclass(frozen=True)
class Placement:
    """Which rank runs on which slot of which host. Ranks are numbered host by host, slot by slot."""

    nodes: tuple[NodePlacement, ...]  # those this command starts
    elsewhere: tuple[NodePlacement, ...] = ()  # those that a `launch` of their own starts (--no-ssh)

    @cached_property
    def world_size(self) -> int:
        return sum(node.num_ranks for node in (*self.nodes, *self.elsewhere))

    @property
    def num_nodes(self) -> int:
        return len(self.nodes) + len(self.elsewhere)

    @property
    def ranks(self) -> list[int]:
        """The ranks this command starts."""
        return [rank for node in self.nodes for rank in node.ranks]

    @property
    def hosts_of_ranks(self) -> list[str]:
        """The host of each rank, in the order of ranks; of a job whose other nodes are started elsewhere, nothing."""
        if self.elsewhere:
            return []
        return [node.host.name for node in self.nodes for _ in node.ranks]

    def only(self, node_rank: int) -> Placement:
        """Return the same job as one of its nodes sees it that is started by hand."""
        here = tuple(node for node in self.nodes if node.node_rank == node_rank)
        return Placement(here, tuple(node for node in self.nodes if node.node_rank != node_rank))

    def label(self, rank: int) -> str:
        """Return `3`, with the host where there are several: `3 node-b`."""
        return f"{rank} {self.node_of(rank).host.name}" if len(self.nodes) > 1 else str(rank)

    def node_of(self, rank: int) -> NodePlacement:
        """Return the node that runs `rank`. Raises: IndexError when no node does."""
        try:
            return self._node_of_rank[rank]
        except KeyError:
            raise IndexError(f"rank {rank} is not in a world of {self.world_size}") from None

    @cached_property
    def _node_of_rank(self) -> dict[int, NodePlacement]:
        """The node of each rank: each piece of output asks for one."""
        return {rank: node for node in self.nodes for rank in node.ranks}


def place(cluster: Cluster) -> Placement:
    """Number ranks host by host in cluster order; hosts without slots get no node rank."""
    nodes: list[NodePlacement] = []
    first_rank = 0
    for host in cluster.hosts:
        if host.slots:
            nodes.append(NodePlacement(len(nodes), host, first_rank))
            first_rank += len(host.slots)
    return Placement(tuple(nodes))
