"""Memory in use, for the log."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from launcher.comm.accelerator import device_module

GIB = 2**30


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use now and at most so far: of the GPU's allocator, or resident on the host."""

    used_bytes: int
    peak_bytes: int

    def __str__(self) -> str:
        return f"{self.used_bytes / GIB:.2f} GiB"


def memory_use(device: torch.device) -> MemoryUse:
    """Return what this process uses on `device`."""
    if device.type != "cpu":
        module = device_module(device)
        return MemoryUse(module.memory_allocated(device), module.max_memory_allocated(device))
    resident_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return MemoryUse(resident_bytes, max(resident_bytes, peak_bytes))  # the kernel brings its peak up to date lazily


@dataclass(frozen=True)
class HostMemory:
    """Memory of this machine."""

    total_bytes: int
    available_bytes: int  # without swapping


def host_memory() -> HostMemory:
    """Return what the kernel says of this machine's memory."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {line[0].rstrip(":"): int(line[1]) for line in lines}
    return HostMemory(kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024)
