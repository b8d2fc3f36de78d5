"""Copies between a device and host memory, beside what the device computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# Makes the work queued on the device from this call on wait for a copy. The host does not wait.
CopyEvent = Callable[[], None]


def completed() -> None:
    """Do nothing: the copy has ended."""


class HostDeviceCopier:
    """Copies in the order they are asked for, on streams of their own where the device is a GPU.

    There is one stream for each direction: a bus carries both at once. With a CPU as device a copy has ended when
    `copy` returns, and there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._to_device, self._to_host = (torch.cuda.Stream(device) if self._is_gpu else None for _ in range(2))

    def empty(self, numel: int, dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
        """Return host memory, 1-D; pinned memory is what a GPU copies from and to without blocking the host."""
        return torch.empty(numel, dtype=dtype, pin_memory=is_pinned and self._is_gpu)

    def copy(self, target: Tensor, source: Tensor) -> CopyEvent:
        """Copy `source`, as the device's work so far leaves it, into `target` of the same shape."""
        stream = self._to_device if target.is_cuda else self._to_host
        if stream is None or target.device == source.device:
            target.copy_(source)
            return completed
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:  # its memory may be given back before the copy has run
                tensor.record_stream(stream)
        copied = stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(copied)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return host memory as the device's work from here on may read it, after all copies so far."""
        for stream in (self._to_device, self._to_host):
            if stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(stream)
        return tensor.to(self._device, non_blocking=True)

    @contextlib.contextmanager
    def ordered_after_copies(self) -> Iterator[None]:
        """Order a collective started within after the device's work and the copies to it so far.

        The device's later work waits for neither, until it waits for the collective.
        """
        if self._to_device is None:
            yield
            return
        self._to_device.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._to_device):
            yield

    def synchronize(self) -> None:
        """Block until everything copied so far is where it was copied to."""
        for stream in (self._to_device, self._to_host):
            if stream is not None:
                stream.synchronize()
