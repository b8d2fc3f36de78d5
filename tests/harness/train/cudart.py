"""A double of CUDA's runtime, as far as it page-locks memory."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


class Cudart:
    """Registers memory as CUDA does: no byte twice, and only what was registered is unregistered.

    What is refused stays the last error until a kernel is launched, which torch asks about it.
    """

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.last_error = 0
        self.registered: dict[int, int] = {}
        self.num_calls = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # CUDA's name
        self.num_calls += 1
        assert flags == 0
        if not self.error:
            assert all(
                address >= begin + size or address + num_bytes <= begin for begin, size in self.registered.items()
            )
            ctypes.c_ubyte.from_address(address).value  # noqa: B018  # it is there
            self.registered[address] = num_bytes
        self.last_error = self.error or self.last_error
        return self.error

    def ones(self, *size: int, device: str) -> Tensor:
        """Be `torch.ones`: a kernel, behind which torch raises the last error, whatever it is of."""
        assert device == "cuda"
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")
        return torch.full(size, 1.0)

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.c_ubyte.from_address(address).value  # noqa: B018  # it is there still
        del self.registered[address]
        return 0
