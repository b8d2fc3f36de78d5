"""Which hosts a job continues with when only some world sizes fit its config. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from launcher.cluster.cluster import Host


class _Kept(NamedTuple):
    """A choice of hosts as a chain from its last host to its first."""

    num_hosts: int
    last: int  # position of the last host
    before: _Kept | None


def largest_fit(hosts: tuple[Host, ...], world_sizes: Collection[int], min_hosts: int) -> tuple[Host, ...] | None:
    """Return the hosts whose slots together are the largest of `world_sizes`, in their order.

    Hosts that are not needed are left out, the last ones where there is a choice. None when no choice of at least
    `min_hosts` hosts fits.
    """
    kept: dict[int, _Kept | None] = {0: None}  # slots together -> the choice with the most hosts
    for position, host in enumerate(hosts):
        for slots, choice in sorted(kept.items(), reverse=True):  # a copy, so that a host counts once
            larger = _Kept(choice.num_hosts + 1 if choice else 1, position, choice)
            known = kept.get(slots + len(host.slots))
            if known is None or larger.num_hosts > known.num_hosts:
                kept[slots + len(host.slots)] = larger
    for world_size in sorted(kept, reverse=True):
        choice = kept[world_size]
        if choice is not None and world_size in world_sizes and choice.num_hosts >= min_hosts:
            return _chosen(hosts, choice)
    return None


def _chosen(hosts: tuple[Host, ...], choice: _Kept | None) -> tuple[Host, ...]:
    positions = []
    while choice is not None:
        positions.append(choice.last)
        choice = choice.before
    return tuple(hosts[position] for position in reversed(positions))
