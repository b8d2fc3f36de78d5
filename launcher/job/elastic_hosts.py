"""Which hosts a job continues with when only some world sizes fit its config. Pure."""

from __future__ import annotations

from collections.abc import Collection

from launcher.cluster.cluster import Host


def largest_fit(hosts: tuple[Host, ...], world_sizes: Collection[int], min_hosts: int) -> tuple[Host, ...] | None:
    """Return the hosts whose slots together are the largest of `world_sizes`, in their order.

    Hosts that are not needed are left out, the last ones where there is a choice. None when no choice of at least
    `min_hosts` hosts fits.
    """
    kept: dict[int, tuple[Host, ...]] = {0: ()}  # slots together -> the choice with the most hosts
    for host in hosts:
        for slots, choice in sorted(kept.items(), reverse=True):  # a copy, so that a host counts once
            larger = slots + len(host.slots)
            if larger not in kept or len(choice) >= len(kept[larger]):
                kept[larger] = (*choice, host)
    fits = (size for size in kept if size in world_sizes and len(kept[size]) >= min_hosts)
    return kept.get(max(fits, default=-1))
