"""Copies between a device and host memory, beside what the device computes."""

from __future__ import annotations

import torch
from torch import Tensor

from launcher.comm.pinned import PinnedMemory
from launcher.comm.streams import NoStreams, Side, StreamEvent, Streams


class HostDeviceCopier:
    """Copies in the order they are asked for, on a side stream for each direction: a bus carries both at once.

    With a CPU as device a copy has ended when `copy` returns, and there is nothing to wait for.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        """streams: of the device; None: it has none."""
        self._device = device
        self._streams = NoStreams() if streams is None else streams
        self._pinned = PinnedMemory() if device.type == "cuda" else None

    def empty(self, numel: int, dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
        """Return host memory, 1-D; pinned memory is what a GPU copies from and to without blocking the host."""
        if self._pinned is None or not is_pinned or not numel:
            return torch.empty(numel, dtype=dtype)
        memory = torch.empty(0, dtype=dtype)
        return memory.set_(self._pinned.empty(numel * dtype.itemsize), 0, (numel,), (1,))

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether the device computes with this memory as it is."""
        return tensor.device.type == self._device.type

    def copy(self, target: Tensor, source: Tensor) -> StreamEvent:
        """Copy `source`, as the current stream's work so far leaves it, into `target` of the same shape.

        Neither may be written, and the memory of neither may be given back, but by work that waits for what is
        returned; the host has to `synchronize` before it reads or writes the one in host memory.
        """
        to_device = self.is_on_device(target)
        if to_device == self.is_on_device(source):
            target.copy_(source)
            return self._streams.record()
        so_far = self._streams.record()
        with self._streams.on(Side.TO_DEVICE if to_device else Side.TO_HOST):
            so_far.wait()
            target.copy_(source, non_blocking=True)
            return self._streams.record()

    def synchronize(self) -> None:
        """Block until everything copied so far is where it was copied to."""
        self._streams.synchronize(Side.TO_DEVICE, Side.TO_HOST)
