"""A double of CUDA's runtime, as far as it page-locks memory."""

from __future__ import annotations

import ctypes


class Cudart:
    """Registers memory as CUDA does: no byte twice, and only what was registered is unregistered."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
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
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        ctypes.c_ubyte.from_address(address).value  # noqa: B018  # it is there still
        del self.registered[address]
        return 0
