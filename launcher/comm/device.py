"""The device of this rank, and what belongs to it: memory of everything in flight and the link to host memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from launcher.base import env
from launcher.base.errors import EngineError
from launcher.comm.buffers import BufferPool
from launcher.comm.host_memory import HostDeviceCopier
from launcher.comm.streams import Streams, streams_of

# ---- The accelerator of this machine, by those names of torch that hold for each kind ----


def accelerator_type() -> str | None:
    """Return the type of device on which ranks train, such as "cuda"; None: they train on the CPU.

    One that only gloo serves, as MPS is, cannot exchange anything between ranks and is left alone.
    """
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or dist.get_default_backend_for_device(accelerator) == "gloo":
        return None
    return accelerator.type


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


# ---- The device of this rank ----


@dataclass(frozen=True, eq=False)
class DeviceRuntime:
    """What an engine has on its device: one for each engine, for all groups that it communicates in."""

    device: torch.device
    streams: Streams = field(init=False, repr=False)  # what runs beside the computing
    buffers: BufferPool = field(init=False, repr=False)  # memory of everything in flight
    copier: HostDeviceCopier = field(init=False, repr=False)  # to and from host memory

    @property
    def is_async_device(self) -> bool:
        """Whether the device works through what the host has queued: the host should not wait for its numbers."""
        return self.device.type != "cpu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "streams", streams_of(self.device))
        object.__setattr__(self, "buffers", BufferPool(self.device, streams=self.streams))
        object.__setattr__(self, "copier", HostDeviceCopier(self.device, self.streams))


def local_device(dist_backend: str | None = None) -> torch.device:
    """Return this rank's device: its own GPU where there is one, else the CPU.

    A rank that sees one GPU alone has that one, as under `srun --gpus-per-task=1`. Where the process group is gloo's,
    or is going to be (`dist_backend`), and there are other ranks, the device is the CPU: gloo sends no GPU memory.
    Raises: EngineError when there are GPUs, and none for this rank.
    """
    kind = accelerator_type()
    if kind is None or not _carries_gpu_memory(kind, dist_backend):
        return torch.device("cpu")
    local_rank, num_visible = int(os.environ.get(env.LOCAL_RANK.name, "0")), torch.accelerator.device_count()
    if num_visible == 1:
        return torch.device(kind, 0)
    if local_rank >= num_visible:
        raise EngineError(
            f"LOCAL_RANK {local_rank} has no GPU: this process sees {num_visible}",
            hint="start fewer ranks on this host, or widen CUDA_VISIBLE_DEVICES",
        )
    return torch.device(kind, local_rank)


def _carries_gpu_memory(kind: str, dist_backend: str | None) -> bool:
    """Whether the process group sends GPU memory; the one that `dist_backend` names where there is none yet."""
    if not dist.is_initialized():
        return dist_backend != "gloo"
    world = dist.group.WORLD
    assert world is not None
    if world.size() == 1:
        return True  # it sends nothing
    return backend_name(world, torch.device(kind)) not in (None, "gloo")


def backend_name(process_group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return the name of what carries the device's memory in a group; None: nothing does.

    A group may have a backend for each type of device; `dist.get_backend` names none of these.
    """
    try:
        name: str = process_group._get_backend(device).name()
    except RuntimeError:
        return None
    return name


def use_local_device(dist_backend: str | None = None) -> torch.device:
    """Make this rank's device the current one, for every library that asks for none, and return it."""
    device = local_device(dist_backend)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    return device
