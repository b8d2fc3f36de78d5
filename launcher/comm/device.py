"""The device of this rank, page-locked host memory, and the copies between the two beside what the device computes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.base import env
from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.base.units import format_bytes
from launcher.comm.buffers import BufferPool
from launcher.comm.streams import PASSED, Side, StreamEvent, Streams, streams_of
from launcher.kernels.cpu import scaled_copy
from launcher.storage.store import aligned_buffer

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


# ---- Host memory that is page-locked, so that a GPU copies from and to it without blocking the host ----
# torch's `pin_memory` rounds each piece up to a power of two, which for a large model is up to twice the host memory
# it should take. Memory that is registered with CUDA where it is takes what was asked for, rounded up to whole pages.

_TOUCH_EVERY_BYTES = 1024  # a page has more; torch gives 32,768 elements to a thread, 32 MiB of these pages


class PinnedMemory:
    """Registers memory with CUDA, each piece once; it is registered until it is freed."""

    def __init__(self) -> None:
        self._has_failed = False

    def empty(self, num_bytes: int) -> torch.UntypedStorage:
        """Return a storage of an `aligned_buffer`, page-locked; where CUDA refuses that, which is said once, pageable.

        Its pages are there: torch's threads touch them, each a part. CUDA would fault them in with one thread.
        """
        memory = (ctypes.c_ubyte * num_bytes).from_buffer(aligned_buffer(num_bytes))
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        tensor[::_TOUCH_EVERY_BYTES].zero_()
        if not self._has_failed:
            unregister = self._register(tensor.data_ptr(), num_bytes)
            if unregister is not None:
                # This is done before `memory`, which the storage holds, gives its own back: no one else has it yet.
                weakref.finalize(memory, unregister).atexit = False  # the process takes its memory with it
        return tensor.untyped_storage()

    def _register(self, address: int, num_bytes: int) -> Callable[[], object] | None:
        runtime = torch.cuda.cudart()
        error = int(runtime.cudaHostRegister(address, num_bytes, 0))
        if error == 0:
            return lambda: runtime.cudaHostUnregister(address)
        self._has_failed = True
        _take_last_error()
        get_logger().warning(
            "cudaHostRegister refused to page-lock %s of host memory (error %d): copies between it and the GPU block"
            " the host. `ulimit -l` bounds the memory that may be page-locked",
            format_bytes(num_bytes),
            error,
        )
        return None


def _take_last_error() -> None:
    """Launch a kernel for CUDA's last error, which a call that was refused leaves behind.

    The runtime keeps it for the next call that asks: torch does after each of its kernels, and would raise it as that
    of a kernel which ran well. `torch.cuda.cudart()` has no `cudaGetLastError`.
    """
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


# ---- Copies between a device and host memory, beside what the device computes ----


class _BothEvents(StreamEvent):
    """Two points, each of a stream of its own: reached when both are."""

    def __init__(self, one: StreamEvent, other: StreamEvent) -> None:
        self._events = one, other

    @property
    def has_passed(self) -> bool:
        return all(event.has_passed for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.wait()

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()


class HostDeviceCopier:
    """Copies in the order they are asked for, on a side stream for each direction: a bus carries both at once.

    With a CPU as device a copy has ended when `copy` returns, and there is nothing to wait for.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        """streams: of the device; None: it has none."""
        self._device = device
        self._streams = Streams() if streams is None else streams
        self._pinned = PinnedMemory() if device.type == "cuda" else None

    @property
    def is_async(self) -> bool:
        """Whether a copy may still be under way when `copy` returns."""
        return self._streams.is_async

    def empty(self, numel: int, dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
        """Return host memory, 1-D; pinned memory is what a GPU copies from and to without blocking the host."""
        if self._pinned is None or not is_pinned or not numel:
            # Other accelerators than CUDA's have no call of torch that registers memory: it is torch's then.
            pins = is_pinned and self._device.type not in ("cpu", "cuda")
            return torch.empty(numel, dtype=dtype, pin_memory=pins)
        memory = torch.empty(0, dtype=dtype)
        return memory.set_(self._pinned.empty(numel * dtype.itemsize), 0, (numel,), (1,))

    def is_on_device(self, tensor: Tensor) -> bool:
        """Whether the device computes with this memory as it is."""
        return tensor.device.type == self._device.type

    def copy(self, target: Tensor, source: Tensor) -> StreamEvent:
        """Copy `source`, as the current stream's work so far leaves it, into `target` of the same shape.

        Neither may be written, and the memory of neither may be given back, but by work that waits for what is
        returned; the host has to `synchronize` before it reads or writes the one in host memory.
        """
        to_device = self.is_on_device(target)
        if to_device == self.is_on_device(source):
            scaled_copy(target, source, 1.0)
            return self._streams.record()
        so_far = self._streams.record()
        with self._streams.on(Side.TO_DEVICE if to_device else Side.TO_HOST):
            so_far.wait()
            target.copy_(source, non_blocking=True)
            return self._streams.record()

    def so_far(self) -> StreamEvent:
        """Return the point at which all copies asked for so far, of both directions, have ended."""
        if not self._streams.is_async:
            return PASSED
        ends = []
        for side in (Side.TO_DEVICE, Side.TO_HOST):
            with self._streams.on(side):
                ends.append(self._streams.record())
        return _BothEvents(*ends)

    def synchronize(self) -> None:
        """Block until everything copied so far is where it was copied to."""
        self._streams.synchronize(Side.TO_DEVICE, Side.TO_HOST)


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


# ---- The allocator of the C library ----
# A backward pass allocates a gradient for each parameter and frees it as soon as it has been collected. By default
# glibc returns what is free at the end of its heap to the kernel, from 128 KiB on, and a tensor of more than that is
# a mapping of its own; both bounds grow, up to 64 and 32 MiB, as tensors are freed. The next gradient is then built
# of new pages, each a page fault, and zeroed by the kernel first: `perf stat -e page-faults` shows them.


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MAPPED_BYTES = 2**17  # malloc's own value before it grows
KEPT_BYTES = 128 * 2**20  # of freed memory at the end of the heap
LARGEST_IN_HEAP_BYTES = 32 * 2**20  # the most that glibc would reach by itself
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have glibc keep up to 128 MiB of freed memory for the next tensors of this process. Returns whether it does.

    It does not where the environment has settings of malloc, which are the user's choice, nor where the C library is
    another one. Memory that is in use does not grow.
    """
    if any(name in os.environ for name in _SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    # One of the two ends the growing of both.
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGEST_IN_HEAP_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))


def map_memory() -> bool:
    """Have each larger block of glibc's malloc be a mapping of its own: until it is touched nothing of it is there, and
    what is freed leaves the process at once. Returns whether it does, which it does not with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES))
