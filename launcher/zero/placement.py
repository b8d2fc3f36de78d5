"""Where the parts of a unit are stored between their uses: on the device, in host memory or on disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import EngineError
from launcher.base.units import format_bytes
from launcher.comm.device import local_device
from launcher.comm.groups import RankGroup
from launcher.config.auto import AutoFacts, resolve_auto
from launcher.config.load import load_config
from launcher.config.policies import OffloadPolicy, Place, offload_policy
from launcher.config.schema import Aio, Config, OffloadOptimizer, OffloadParam
from launcher.storage.store import AioSettings
from launcher.zero.disk import Disk, Swapped


@dataclass(frozen=True)
class Placement:
    """One place."""

    place: Place = Place.DEVICE
    is_pinned: bool = True  # host memory that is page-locked
    disk: Disk | None = None  # where the place is one

    @property
    def is_offloaded(self) -> bool:
        """Whether it is not the device."""
        return self.place is not Place.DEVICE

    def empty(self, numel: int, dtype: torch.dtype, group: RankGroup) -> Tensor:
        """Return memory there, 1-D; for a disk the host memory that is going to be swapped."""
        if not self.is_offloaded:
            return torch.empty(numel, dtype=dtype, device=group.device)
        return group.copier.empty(numel, dtype, is_pinned=self.is_pinned and self.disk is None)

    def swapped(self, tensor: Tensor) -> Swapped | None:
        """Put a tensor from `empty` on the disk, if the placement has one. Its values are not written yet."""
        return None if self.disk is None else Swapped(self.disk, tensor)


ON_DEVICE = Placement()
_REMOTE_DEVICES = frozenset(place.value for place in Place)


@dataclass(frozen=True)
class Disks:
    """The swap space of this rank, as far as it needs any."""

    optimizer: Disk | None = None
    params: Disk | None = None

    @property
    def notices(self) -> list[str]:
        """What a user of this host should know about the folders, each thing once."""
        disks = [disk for disk in (self.optimizer, self.params) if disk is not None]
        stores = [disk.store for disk in disks]
        sizes: dict[str, int] = {}
        for store in stores:
            sizes[store.folder] = sizes.get(store.folder, 0) + store.size_bytes
        notices = [f"{folder}: {format_bytes(size)} reserved for this rank" for folder, size in sizes.items()]
        if not all(disk.memory.is_pooled for disk in disks):
            notices.append(
                f"torch {torch.__version__} cannot move memory between tensors: what is read and written is copied"
                " through aligned blocks and not page-locked, which takes several times as long; install torch 2.12 or"
                " a newer one"
            )
        return [*notices, *dict.fromkeys(store.notice for store in stores if store.notice is not None)]


NO_DISKS = Disks()


def open_disk(section: OffloadOptimizer | OffloadParam, aio: Aio, *, writes_behind: bool) -> Disk | None:
    """Open the file of what a section offloads to disk; None where it does not.

    Raises: EngineError for a folder that cannot be written.
    """
    if section.device != Place.DISK.value:
        return None
    settings = AioSettings(int(aio.block_size), int(aio.queue_depth), int(aio.intra_op_parallelism))
    pins_memory = section.pin_memory and local_device().type == "cuda"
    return Disk(str(section.nvme_path), settings, writes_behind=writes_behind, pins_memory=pins_memory)


def settings_for_construction(config: Any) -> Config:
    """Return the config of the engine to come, as far as a model is built by it: optimizer and schedule are left out.

    config: as `initialize` takes it; None: none is known. Raises: ConfigError.
    """
    if config is None:
        return Config()
    loaded = load_config(config, is_of_engine=True).config.model_copy(update={"optimizer": None, "scheduler": None})
    return resolve_auto(loaded, AutoFacts())[0]


def shard_placements(settings: Config, remote_device: str | None) -> Placements | None:
    """Return the placements of shards that are made before there is an engine; None where they stay on the device.

    settings: of the engine to come. remote_device: instead of its `offload_param.device`. Raises: EngineError.
    """
    section = settings.zero_optimization.offload_param
    device = remote_device or offload_policy(settings).params.value
    if device not in _REMOTE_DEVICES or (device == Place.DISK.value and not section.nvme_path):
        raise EngineError(
            f'zero.Init(remote_device="{device}") is not possible',
            hint='"none", "cpu", or "nvme" with a config whose offload_param names an nvme_path',
        )
    policy = replace(offload_policy(settings), params=Place(device))
    if policy.params is Place.DEVICE:
        return None
    section = section.model_copy(update={"device": device})
    return Placements(policy, Disks(params=open_disk(section, settings.aio, writes_behind=True)), trained_numel=0)


class Placements:
    """Gives each unit its placements; asked in unit order."""

    def __init__(self, policy: OffloadPolicy, disks: Disks, trained_numel: int) -> None:
        self._policy = policy
        self._disks = disks
        self._optimizer_left = policy.optimizer_ratio * trained_numel  # elements whose optimizer goes away
        self._host_left = policy.max_host_params  # elements of shards that stay in host memory

    def of_optimizer(self, numel: int) -> Placement:
        """Return the placement of the master, the states and the summed gradient of a unit of `numel` elements."""
        if self._policy.optimizer is Place.DEVICE or self._optimizer_left <= 0:
            return ON_DEVICE
        self._optimizer_left -= numel
        return Placement(self._policy.optimizer, self._policy.pins_optimizer, self._disks.optimizer)

    def of_shard(self, numel: int) -> Placement:
        """Return the placement of a sharded unit's shard of `numel` elements."""
        policy = self._policy
        if policy.params is Place.DISK and numel <= self._host_left:
            self._host_left -= numel
            return Placement(Place.HOST, policy.pins_params)
        return Placement(policy.params, policy.pins_params, self._disks.params)
