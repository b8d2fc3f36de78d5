"""The device that ranks train on, by DeepSpeed's names: `deepspeed.accelerator`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.base import env
from launcher.base.errors import EngineError
from launcher.comm.device import accelerator_type, device_module
from launcher.compat.op_builders import ALL_OPS, NotImplementedBuilder, OpBuilder
from launcher.monitor.meters import host_memory, memory_use

# Names of torch's modules for kinds of devices that the CPU's does not have: what they return there. Nothing is cached
# and nothing is waited for on a CPU.
_ON_CPU: dict[str, Callable[..., Any]] = {
    "empty_cache": lambda: None,
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "initial_seed": torch.initial_seed,
    "is_current_stream_capturing": lambda: False,
}

# Constructors of tensors, by what they hold: torch's own on the CPU.
_TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
_NUMA_NODES = Path("/sys/devices/system/node")


class Accelerator:
    """The kind of device of this machine. What is not here is the function of that name in torch's module of it."""

    def __init__(self) -> None:
        self._name = accelerator_type() or "cpu"
        self._compile_backend = "inductor"

    # ---- devices ----

    def device_name(self, device_index: int | None = None) -> str:
        """Return such as "cuda:1", or "cuda" without an index; "cpu" has none."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def current_device(self) -> int:
        """Return the index of the current device; on the CPU this process's rank on its node."""
        is_cpu = self._name == "cpu"
        return int(os.environ.get(env.LOCAL_RANK.name, "0")) if is_cpu else torch.accelerator.current_device_index()

    def device_count(self) -> int:
        """Return the devices of this node; on the CPU its ranks, or else the NUMA nodes with cores."""
        return _num_cpu_devices() if self._name == "cpu" else int(device_module(self._name).device_count())

    def current_device_name(self) -> str:
        """Return such as "cuda:0", or "cpu"."""
        return self._name if self._name == "cpu" else f"{self._name}:{torch.accelerator.current_device_index()}"

    def device(self, device_index: int | None = None) -> torch.device:
        """Return the device itself."""
        return torch.device(self.device_name(device_index))

    def is_available(self) -> bool:
        """Whether ranks can train on it; on the CPU they always can."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether the host computes itself, and waits for nothing."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def communication_backend_name(self) -> str:
        """Return the backend of torch.distributed that serves it."""
        return dist.get_default_backend_for_device(self._name)

    @property
    def _communication_backend_name(self) -> str:
        return self.communication_backend_name()

    def visible_devices_envs(self) -> list[str]:
        """Return the variables that say which devices a process sees; launchers of CPU ranks take CUDA's."""
        return ["ZE_AFFINITY_MASK" if self._name == "xpu" else "CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: Sequence[int]) -> None:
        """Write the devices that a process to be started shall see into its environment."""
        current_env.update(dict.fromkeys(self.visible_devices_envs(), ",".join(map(str, local_accelerator_ids))))

    def export_envs(self) -> list[str]:
        """Return how the names of variables begin that ranks on other hosts need, besides those of every device."""
        return ["NCCL"] if self._name == "cuda" else []

    def set_device(self, device_index: int) -> None:
        """Make a device the current one; the CPU always is."""
        if self._name != "cpu":
            device_module(self._name).set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for all work of the device."""
        self._asked("synchronize", device_index)

    def current_stream(self, device_index: int | None = None) -> Any:
        """Return the stream in use; on the CPU one that does nothing."""
        return self._asked("current_stream", device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        """Return the stream in use where the script chooses none."""
        return self._asked("current_stream" if self._name == "cpu" else "default_stream", device_index)

    def _asked(self, name: str, device_index: int | None) -> Any:
        """Call a function of torch's module: it takes a device, and has another name for that argument."""
        return getattr(device_module(self._name), name)(self.device(device_index))

    # ---- random states ----

    def random(self) -> Any:
        """Return torch's module of random states."""
        return torch.random

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """Return the random state of a device."""
        state: Tensor = torch.get_rng_state() if self._name == "cpu" else self._asked("get_rng_state", device_index)
        return state

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Change the random state of a device to what `get_rng_state` has returned."""
        if self._name == "cpu":
            torch.set_rng_state(new_state)
        else:
            device_module(self._name).set_rng_state(new_state, self.device(device_index))

    def default_generator(self, device_index: int) -> torch.Generator:
        """Return the generator of a device's random numbers."""
        if self._name == "cpu":
            return torch.default_generator
        generator: torch.Generator = device_module(self._name).default_generators[device_index]
        return generator

    # ---- precisions ----

    def is_bf16_supported(self) -> bool:
        """Whether it computes in bfloat16."""
        return self._name == "cpu" or bool(device_module(self._name).is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Whether it computes in float16."""
        return True

    def is_fp64_supported(self) -> bool:
        """Whether it computes in float64."""
        return self._name != "mps"

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the precisions that ranks can train in."""
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    # ---- memory, in bytes ----

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return what this process uses of the device; on the CPU its resident memory."""
        return memory_use(self.device(device_index)).used_bytes

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Return the most that this process has used so far."""
        return memory_use(self.device(device_index)).peak_bytes

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return what the allocator holds."""
        if self._name == "cpu":
            return self.memory_allocated()
        return int(device_module(self._name).memory_reserved(device_index))

    memory_cached = memory_reserved

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Return the most that the allocator has held."""
        is_cpu = self._name == "cpu"
        return (
            self.max_memory_allocated() if is_cpu else int(device_module(self._name).max_memory_reserved(device_index))
        )

    max_memory_cached = max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Return the numbers of the device's allocator; on the CPU two of them, of the resident memory."""
        if self._name != "cpu":
            return dict(self._asked("memory_stats", device_index))
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Forget the most that was used so far. On the CPU nothing happens: the kernel keeps its own count."""
        if self._name != "cpu":
            self._asked("reset_peak_memory_stats", device_index)

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the memory of the device; on the CPU that of the machine."""
        if self._name == "cpu":
            return host_memory().total_bytes
        return int(device_module(self._name).get_device_properties(self.device(device_index)).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return what is free of it."""
        if self._name == "cpu":
            return host_memory().available_bytes
        return int(device_module(self._name).mem_get_info(self.device(device_index))[0])

    def pin_memory(
        self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True, *, align_bytes: int = 1
    ) -> Tensor:
        """Return a copy in page-locked memory; on the CPU the tensor itself.

        make_copy: False returns memory of the tensor's size without its values. match_shape: False, flat then.
        align_bytes: an argument of earlier releases. Raises: EngineError where the memory does not start at a multiple.
        """
        if self._name == "cpu":
            pinned = tensor
        elif make_copy:
            pinned = tensor.pin_memory()
        else:
            pinned = tensor.new_empty(tensor.shape if match_shape else (tensor.numel(),), pin_memory=True)
        if pinned.data_ptr() % max(align_bytes, 1):
            raise EngineError(f"pin_memory(): the memory is not aligned to {align_bytes} bytes", hint="ask for less")
        return pinned

    def pin_empty(self, shape: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Return page-locked memory of a shape without values; on the CPU plain memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._name != "cpu")

    def pin_empty_like(self, tensor: Tensor) -> Tensor:
        """Return the same for the shape and type of a tensor."""
        return self.pin_empty(tensor.shape, tensor.dtype)

    def unpin_memory(self, tensor: Tensor) -> None:
        """Do nothing: torch unlocks memory when its last tensor goes."""

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in page-locked memory."""
        return tensor.is_pinned()

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether a tensor is on a device of this kind."""
        return tensor.device.type == self._name

    # ---- graphs ----

    def create_graph(self) -> Any:
        """Return a graph to capture work in; None on the CPU, which has none."""
        return None if self._name == "cpu" else getattr(device_module(self._name), f"{self._name.upper()}Graph")()

    def capture_to_graph(
        self, graph: Any, pool: Any = None, stream: Any = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a context whose work goes into `graph`; on the CPU it is done at once."""
        if self._name == "cpu":
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = device_module(self._name).graph(graph, pool, stream)
        return context

    def replay_graph(self, graph: Any) -> None:
        """Do the work of a graph again; nothing on the CPU."""
        if self._name != "cpu":
            graph.replay()

    # ---- kernels ----

    def op_builder_dir(self) -> str:
        """Return the module of the builders."""
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> type[OpBuilder]:
        """Return the builder of that name, or the one of kernels that do not exist here."""
        builders = {type(builder).__name__: type(builder) for builder in ALL_OPS.values()}
        return builders.get(class_name, NotImplementedBuilder)

    def create_op_builder(self, op_name: str) -> OpBuilder:
        """Return the builder of that class."""
        return self.get_op_builder(op_name)()

    def build_extension(self) -> Any:
        """Return torch's command that builds extensions, for a script's own setup.py."""
        return importlib.import_module("torch.utils.cpp_extension").BuildExtension

    # ---- the rest ----

    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> None:
        """Open a range of a profile of NVIDIA's tools; elsewhere nothing is opened.

        domain, category: shown before the message: torch's ranges have neither.
        """
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(": ".join([*filter(None, (domain, category)), msg]))

    def range_pop(self, domain: str | None = None) -> None:
        """Close the last range, of whichever domain."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()

    def is_triton_supported(self) -> bool:
        """Whether Triton's kernels run on it."""
        return self._name in ("cuda", "xpu")

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call `callback` once the device is ready, which is now."""
        return callback()

    def get_compile_backend(self) -> str:
        """Return the backend that scripts give to `torch.compile`."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Choose what `get_compile_backend` returns. Raises: EngineError for one that torch does not know."""
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise EngineError(f'torch.compile has no backend "{backend}"', hint=f"known: {', '.join(known)}")
        self._compile_backend = backend

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name in _TENSORS:
            on_device = functools.partial(torch.tensor, dtype=_TENSORS[name], device=self._name)
            return getattr(torch, name) if self._name == "cpu" else on_device
        if self._name == "cpu" and name in _ON_CPU:
            return _ON_CPU[name]
        return getattr(device_module(self._name), name)


class CpuAccelerator(Accelerator):
    """The CPU, for a script that chooses it by name."""

    def __init__(self) -> None:
        super().__init__()
        self._name = "cpu"


def _num_cpu_devices() -> int:
    for known in (env.LOCAL_SIZE, env.LOCAL_WORLD_SIZE):
        if (text := os.environ.get(known.name, "")).isdigit() and int(text):
            return int(text)
    with contextlib.suppress(OSError):
        return max(1, len({cores for path in _NUMA_NODES.glob("node*/cpulist") if (cores := path.read_text().strip())}))
    return 1


_chosen: list[Accelerator] = []  # the accelerator of this process


def get_accelerator() -> Accelerator:
    """Return the accelerator of this process, the same one at each call."""
    if not _chosen:
        _chosen.append(Accelerator())
    return _chosen[0]


def set_accelerator(accel_obj: Any) -> None:
    """Choose what `get_accelerator` returns, such as a class with functions of its own.

    Raises: EngineError for one of another class, or of a device that the engine does not train on.
    """
    if not isinstance(accel_obj, Accelerator):
        name = type(accel_obj).__name__
        raise EngineError(
            f"set_accelerator(): {name} is not an Accelerator", hint="derive it from DeepSpeedAccelerator"
        )
    if accel_obj.device_name() != (own := accelerator_type() or "cpu"):
        raise EngineError(
            f"set_accelerator(): the device is {accel_obj.device_name()}, and ranks train on {own}",
            hint="hide other devices, as by CUDA_VISIBLE_DEVICES",
        )
    _chosen[:] = [accel_obj]


def is_current_accelerator_supported() -> bool:
    """Whether ranks can train on the accelerator of this process, which they always can."""
    return get_accelerator().is_available()
