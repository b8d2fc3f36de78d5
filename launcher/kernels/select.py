"""Which kernel a device gets."""

from __future__ import annotations

from launcher.kernels.api import Kernel
from launcher.kernels.cpu import load_cpu_kernel


def kernel_for(device_type: str) -> Kernel | None:
    """Return the fused kernel for a kind of device; None where torch's own optimizers serve."""
    return load_cpu_kernel() if device_type == "cpu" else None
