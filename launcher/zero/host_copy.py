"""What `engine.offload_states()` moves: memory of the device whose values are in host memory for a while.

As with what is on disk (`zero.disk`) it is the memory under a storage that goes and comes: every tensor and view of it
has its values again once they are back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from launcher.base.errors import EngineError
from launcher.comm.device import device_module


class HostCopy:
    """The storages of some tensors of one device, with the host memory that their values go to."""

    def __init__(self, tensors: Iterable[Tensor], *, pins_memory: bool) -> None:
        """tensors: on one device, with memory. pins_memory: the host memory is page-locked."""
        self._storages = list({each._cdata: each for each in (tensor.untyped_storage() for tensor in tensors)}.values())
        self._device = self._storages[0].device
        self._copies = [
            torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pins_memory) for storage in self._storages
        ]
        self.is_out = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the device that are free while the values are out."""
        return sum(copy.numel() for copy in self._copies)

    def host_view(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor of one of the storages where they are while they are out: a view."""
        place = [storage._cdata for storage in self._storages].index(tensor.untyped_storage()._cdata)
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(self._copies[place].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def copy_out(self) -> None:
        """Copy the values to host memory. The device is waited for."""
        _synchronize(self._device)  # streams of the engine may still write the values
        for copy, storage in zip(self._copies, self._storages, strict=True):
            copy.copy_(_bytes_of(storage), non_blocking=True)
        _synchronize(self._device)

    def free(self) -> None:
        """Free the memory of the values on the device, which `copy_out` has copied."""
        for storage in self._storages:
            storage.resize_(0)
        self.is_out = True

    def bring_in(self) -> None:
        """Copy the values back. The device is waited for: the engine reads them on several streams."""
        for copy, storage in zip(self._copies, self._storages, strict=True):
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        _synchronize(self._device)
        self.is_out = False

    @contextlib.contextmanager
    def on_device(self, *, writes: bool) -> Iterator[None]:
        """Have the values on the device. writes: they are changed."""
        if not self.is_out:  # within another such block
            yield
            return
        self.bring_in()
        try:
            yield
        finally:
            if writes:
                self.copy_out()
            else:
                _synchronize(self._device)
            self.free()


class OffloadedUnit:
    """What of one unit is in host memory."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._copy: HostCopy | None = None
        self._has_values = True

    @property
    def is_offloaded(self) -> bool:
        """Whether anything is."""
        return self._copy is not None

    def keep(self, copy: HostCopy, *, has_values: bool) -> None:
        """Free what `copy` has copied. has_values: the parameters' own values are not among it."""
        self._copy, self._has_values = copy, has_values
        copy.free()

    def bring_in(self) -> None:
        """Bring it back, with what was written there since."""
        if self._copy is not None:
            self._copy.bring_in()
        self._copy, self._has_values = None, True

    def on_device(self, *, writes: bool) -> contextlib.AbstractContextManager[None]:
        """Have it on the device. writes: it is changed."""
        return contextlib.nullcontext() if self._copy is None else self._copy.on_device(writes=writes)

    def check_values(self) -> None:
        """Raise EngineError where the parameters' values are in host memory."""
        if not self._has_values:
            raise EngineError(
                f"engine.offload_states() has moved the parameters to host memory, {self._label or 'these'} among them",
                hint="call engine.reload_states() before",
            )


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(device: torch.device) -> None:
    device_module(device).synchronize(device)


def is_in_host_memory(tensor: Tensor) -> bool:
    """Whether a tensor has no memory of a device that could be freed: it is offloaded, or on disk."""
    return tensor.device.type == "cpu"
