"""The accelerator of this machine, by those names of torch that hold for each kind: CUDA, ROCm, XPU and others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


def accelerator_type() -> str | None:
    """Return the type of device on which ranks train, such as "cuda"; None: they train on the CPU.

    One that only gloo serves, as MPS is, cannot exchange anything between ranks and is left alone.
    """
    if not torch.accelerator.is_available():
        return None
    found = torch.accelerator.current_accelerator()
    if found is None or dist.get_default_backend_for_device(found) == "gloo":
        return None
    return found.type


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Have torch's random numbers, of the CPU and of a device in use, continue after the block as if it had not run."""
    kind = accelerator_type()
    module = None if kind is None else device_module(kind)
    is_used = module is not None and getattr(module, "is_initialized", lambda: True)()
    devices = [module.current_device()] if module is not None and is_used else []
    with torch.random.fork_rng(devices=devices, device_type=kind or "cuda"):
        yield


def device_module(device: torch.device | str) -> Any:
    """Return torch's module of a type of device, such as `torch.cuda`: streams, events, memory, random states."""
    return torch.get_device_module(device)


def offset_seed(device: torch.device, offset: int) -> None:
    """Have this rank's device draw other random numbers than ranks with another offset and the same seed.

    Not on a CPU: there the samplers of scripts draw from the same generator, and ranks need the same samples.
    """
    if device.type != "cpu":
        device_module(device).manual_seed(torch.initial_seed() + offset)
