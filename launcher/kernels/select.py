"""Which kernel a kind of device gets, and why."""

from __future__ import annotations

from launcher.kernels.api import Kernel
from launcher.kernels.cpu import cpu_kernel_status, load_cpu_kernel
from launcher.kernels.triton_kernels import load_triton_kernel, triton_problem


def kernel_for(device_type: str) -> Kernel | None:
    """Return the fused kernel for a kind of device; None where torch's own optimizers serve."""
    loads = {"cpu": load_cpu_kernel, "cuda": load_triton_kernel}
    return loads[device_type]() if device_type in loads else None


def describe_kernel(device_type: str) -> str:
    """Return the name of the kernel for a kind of device, and why it is this one."""
    if device_type == "cpu":
        cpu = cpu_kernel_status()
        return f"{cpu.kernel.name if cpu.kernel else 'torch'} ({cpu.reason})"
    if device_type == "cuda":
        gpu = load_triton_kernel()
        return f"torch ({triton_problem()})" if gpu is None else gpu.name
    return f"torch (there is none for {device_type})"
