"""Copies between a device and host memory, beside what the device computes."""

from __future__ import annotations

import torch
from torch import Tensor


class HostLink:
    """Copies in the order they are asked for, on a stream of their own where the device is a GPU.

    With a CPU as device a copy has ended when `copy` returns, and there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def empty(self, numel: int, dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
        """Return host memory, 1-D; pinned memory is what a GPU copies from and to without blocking anybody."""
        return torch.empty(numel, dtype=dtype, pin_memory=is_pinned and self._stream is not None)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy `source`, as the device's work so far leaves it, into `target` of the same shape."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if tensor.is_cuda:  # its memory may be given back before the copy has run
                tensor.record_stream(self._stream)

    def join(self) -> None:
        """Let the device's work from here on see everything copied so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Block until everything copied so far is in host memory."""
        if self._stream is not None:
            self._stream.synchronize()
