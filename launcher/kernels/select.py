"""Which kernel a kind of device gets, and why."""

from __future__ import annotations

from launcher.kernels.api import Kernel
from launcher.kernels.cpu import cpu_kernel_status, load_cpu_kernel
from launcher.kernels.triton_kernels import load_triton_kernel, triton_problem


def kernel_for(device_type: str) -> Kernel | None:
    """Return the fused kernel for a kind of device; None where torch's own optimizers serve."""
    loads = {"cpu": load_cpu_kernel, "cuda": load_triton_kernel}
    return loads[device_type]() if device_type in loads else None


def describe_kernels() -> dict[str, str]:
    """Return, by kind of device, the kernel's name and why it is this one; for `launch report`."""
    cpu, gpu = cpu_kernel_status(), load_triton_kernel()
    return {
        "cpu": f"{cpu.kernel.name if cpu.kernel else 'torch'} ({cpu.reason})",
        "cuda": f"torch ({triton_problem()})" if gpu is None else gpu.name,
    }
