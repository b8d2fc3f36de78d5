"""What torch is here and which kernels the engine gets, as one line of JSON.

`launch report` runs this in a process of its own, because the command line never imports torch.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from launcher.comm.buffers import BufferPool
from launcher.kernels.select import describe_kernel, kernel_for
from launcher.optim.api import ParamShard
from launcher.optim.factory import SUPPORTED_TYPES, OptimizerBackend, plan_from_config


def torch_facts() -> dict[str, Any]:
    """Return versions, backends, devices, and the optimizer kernel of each kind of device; sizes in bytes."""
    has_cuda = torch.cuda.is_available()
    has_nccl = dist.is_available() and dist.is_nccl_available()
    kinds = ["cpu", *(["cuda"] if has_cuda else [])]
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_cuda and has_nccl else None,
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "devices": [_device(index) for index in range(torch.cuda.device_count())] if has_cuda else [],
        "optimizers": {kind: {name: _kernel(name, kind) for name in SUPPORTED_TYPES} for kind in kinds},
        "kernels": {kind: describe_kernel(kind) for kind in ("cpu", "cuda")},
    }


def _device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
    }


def _kernel(optimizer: str, device: str) -> str:
    """Take one real step; return the kernel's label, or why it does not run."""
    master, grad = torch.zeros(8, device=device), torch.ones(8, device=device)
    shard = ParamShard("weight", master.shape, range(8), master, grad, group=0)
    try:
        backend = OptimizerBackend(
            {device: kernel} if (kernel := kernel_for(device)) else {}, BufferPool(torch.device(device))
        )
        built = plan_from_config(optimizer, {}, nn.Linear(1, 1), None).build([shard], backend)
        built.step()
    except RuntimeError as error:  # torch's own: no kernel for this device, a driver that does not fit
        return f"does not run: {str(error).splitlines()[0]}"
    return built.label


def main() -> None:
    """Print the facts."""
    sys.stdout.write(json.dumps(torch_facts()) + "\n")
