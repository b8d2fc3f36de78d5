"""The device that ranks train on, by DeepSpeed's names: `deepspeed.accelerator`."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from launcher.comm.accelerator import accelerator_type, device_module


class Accelerator:
    """The kind of device of this machine. What is not here is the function of that name in torch's module of it."""

    def __init__(self) -> None:
        self._name = accelerator_type() or "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        """Return such as "cuda:1", or "cuda" without an index; "cpu" has none."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device(self) -> int | str:
        """Return the index of the current device; "cpu" on the CPU."""
        return "cpu" if self._name == "cpu" else torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        """Return such as "cuda:0", or "cpu"."""
        return self._name if self._name == "cpu" else f"{self._name}:{torch.accelerator.current_device_index()}"

    def device(self, device_index: int | None = None) -> torch.device:
        """Return the device itself."""
        return torch.device(self.device_name(device_index))

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed that serves it."""
        return dist.get_default_backend_for_device(self._name)

    def is_synchronized_device(self) -> bool:
        """Whether the host computes itself, and waits for nothing."""
        return self._name == "cpu"

    def is_bf16_supported(self) -> bool:
        """Whether it computes in bfloat16."""
        return self._name == "cpu" or bool(device_module(self._name).is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Whether it computes in float16."""
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(device_module(self._name), name)


@functools.cache
def get_accelerator() -> Accelerator:
    """Return the accelerator of this process, the same one at each call."""
    return Accelerator()
