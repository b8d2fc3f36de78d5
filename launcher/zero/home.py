"""Where the parts of a unit rest between their uses: on the device, in host memory or on disk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.comm.groups import DataParallelGroup
from launcher.zero.disk import Disk, Swapped
from launcher.zero.stages import OffloadPolicy, Place


@dataclass(frozen=True)
class Home:
    """One place."""

    place: Place = Place.DEVICE
    is_pinned: bool = True  # host memory that is page-locked
    disk: Disk | None = None  # where the place is one

    @property
    def is_away(self) -> bool:
        """Say whether it is not the device."""
        return self.place is not Place.DEVICE

    def empty(self, numel: int, dtype: torch.dtype, group: DataParallelGroup) -> Tensor:
        """Return memory there, 1-D; for a disk the host memory that is going to be swapped."""
        if not self.is_away:
            return torch.empty(numel, dtype=dtype, device=group.device)
        return group.link.empty(numel, dtype, is_pinned=self.is_pinned and self.disk is None)

    def swapped(self, tensor: Tensor) -> Swapped | None:
        """Let a tensor from `empty` rest on the disk, where this is one. Its values are not written yet."""
        return None if self.disk is None else Swapped(self.disk, tensor)


HERE = Home()


@dataclass(frozen=True)
class Disks:
    """The swap space of this rank, as far as it needs any."""

    optimizer: Disk | None = None
    params: Disk | None = None


NO_DISKS = Disks()


class Homes:
    """Gives each unit its homes; asked in unit order."""

    def __init__(self, policy: OffloadPolicy, disks: Disks, trained_numel: int) -> None:
        self._policy = policy
        self._disks = disks
        self._optimizer_left = policy.optimizer_ratio * trained_numel  # elements whose optimizer goes away
        self._host_left = policy.max_host_params  # elements of shards that stay in host memory

    def of_optimizer(self, numel: int) -> Home:
        """Return the home of the master, the states and the summed gradient of a unit of `numel` elements."""
        if self._policy.optimizer is Place.DEVICE or self._optimizer_left <= 0:
            return HERE
        self._optimizer_left -= numel
        return Home(self._policy.optimizer, self._policy.pins_optimizer, self._disks.optimizer)

    def of_shard(self, numel: int) -> Home:
        """Return the home of a sharded unit's shard of `numel` elements."""
        policy = self._policy
        if policy.params is Place.DISK and numel <= self._host_left:
            self._host_left -= numel
            return Home(Place.HOST, policy.pins_params)
        return Home(policy.params, policy.pins_params, self._disks.params)
