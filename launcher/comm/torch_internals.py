"""What the engine needs of torch's private parts, each in one place: look here first when a new torch breaks it.

`tests/comm/test_torch_internals.py` has a test of each, which fails alone. Not here are the operators `_foreach_*`, the
attributes `_version`, `_base` and `_cdata` of tensors, and what `checkpoint/zero_to_fp32.py` uses, which runs without
this package.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_map_only

__all__ = ["tree_flatten", "tree_flatten_with_path", "tree_leaves", "tree_map", "tree_map_only"]

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T", bound=Tensor)
_DYNAMO_MARK = "__dynamo_disable"
_KINETO_LOG_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "6"


def _outside_dynamo(function: _F) -> _F:
    """Give a function the mark of `without_dynamo`."""
    setattr(function, _DYNAMO_MARK, function)
    return function


# ---- Autograd ----


def is_in_backward() -> bool:
    """Whether this thread runs a node of a backward pass, or a hook of one."""
    return bool(torch._C._current_graph_task_id() != -1)


def after_backward(callback: Callable[[], None]) -> None:
    """Have the backward pass that runs call `callback` at its end. Must be called within one."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_executed(node: Node) -> bool:
    """Whether the backward pass that runs executes a node. Must be called within one.

    Raises: RuntimeError for the leaf of a `torch.autograd.grad` that was asked for its gradient.
    """
    return bool(torch._C._will_engine_execute_node(node))


def drop_outdated_accumulator(leaf: Tensor) -> None:
    """Have the next graph find a new node for the gradient of `leaf` where the present one has another shape.

    A graph that was recorded when the leaf had other memory keeps the node of then. Torch drops it where `data` changes
    its type, and takes no notice of a change of shape.
    """
    if not leaf.requires_grad or torch.is_inference_mode_enabled():  # there no graph is recorded
        return
    node: Any = get_gradient_edge(leaf).node
    if tuple(node._input_metadata[0].shape) != tuple(leaf.shape):
        data, other = leaf.data, torch.float64 if leaf.dtype is torch.float32 else torch.float32
        leaf.data = data.new_empty(0, dtype=other)
        leaf.data = data


def is_in_transform() -> bool:
    """Whether a transform of torch.func, such as grad or vmap, runs on this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@functools.cache
def divided_backward() -> Any:
    """Return the module by which torch's schedules of pipelines divide a backward in two."""
    return importlib.import_module("torch.distributed.pipelining._backward")


# ---- Tensors and modules ----

no_torch_function: Any = torch._C._disabled_torch_function_impl  # for a subclass that is seen by its dispatch alone
as_plain_tensors: Any = torch._C.DisableTorchFunctionSubclass  # within it, subclasses are handled as Tensor is


def wrapper_of(kind: type[_T], tensor: Tensor) -> _T:
    """Return a tensor of a subclass, with the shape, dtype and device of `tensor` and without memory."""
    made: _T = Tensor._make_wrapper_subclass(kind, tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return made


def num_load_hooks(module: nn.Module) -> int:
    """Return how many hooks run when a state dict is loaded into a module itself, before and after it."""
    return len(module._load_state_dict_pre_hooks) + len(module._load_state_dict_post_hooks)


def hooks_around(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks that run with a call of a module or with its backward; those set for all modules, too."""
    shared = nn.modules.module
    found = (
        *(module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks),
        *(shared._global_forward_pre_hooks, shared._global_forward_hooks),
        *(shared._global_backward_pre_hooks, shared._global_backward_hooks),
    )
    return [hook for hooks in found for hook in hooks.values()]


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that are in no state dict."""
    return module._non_persistent_buffers_set


# ---- Processes and profilers ----


def default_store() -> Any:
    """Return the store that the default process group was made with. Raises: ValueError without one."""
    return dist.distributed_c10d._get_default_store()


def num_groups() -> int:
    """Return how many process groups this process has made: torch names the next one by it."""
    return int(dist.distributed_c10d._world.group_count)


def ranks_of_groups() -> dict[str, list[int]]:
    """Return the ranks of the world that belong to each process group of this process, by the group's name."""
    world = dist.distributed_c10d._world
    return {world.pg_names[group]: sorted(ranks) for group, ranks in world.pg_group_ranks.items()}


def recorded_collectives() -> list[dict[str, Any]]:
    """Return what torch's flight recorders hold, oldest first; [] where this torch has none.

    There are two: of NCCL, and of everything else. The stacks that they hold are left out: to look these up takes the
    interpreter's lock while the recorder's own is held, in which a thread that records would wait for good.
    """
    entries: list[dict[str, Any]] = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump()).get("entries", [])
    return entries


def is_recorded() -> bool:
    """Whether a profiler records what this process does now."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def is_profiler_open() -> bool:
    """Whether a profiler is open in this process: it records, or waits for the step at which it shall."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def _profiler_state() -> Any:
    return torch.autograd.profiler


class TraceProfile:
    """torch's profile of what a thread does between two moments.

    `torch.profiler.profile` does the same after it has imported torch._inductor, which takes seconds.
    """

    def __init__(self, device: str | None) -> None:
        """device: kind of the device that is profiled, too."""
        self.needs_warm_up = device is not None  # the first kernels take longer: one step is better left out
        level = _KINETO_LOG_LEVEL if device is None and _KINETO_LOG_LEVEL not in os.environ else None
        if level is not None:
            os.environ[level] = _SILENT  # of lines that say "profiler_start"; it is read once
        self._profile = torch.autograd.profiler.profile(use_device=device, use_kineto=True)
        self._profile._prepare_trace()
        self._has_started = False
        if level is not None:
            del os.environ[level]

    def start(self) -> None:
        """Begin to record. One profiler of a process ends the other: no other may be open."""
        self._profile._start_trace()
        self._has_started = True
        # Any other profiler that starts or stops sets it.
        _profiler_state()._is_profiler_enabled = self

    def stop(self) -> bool:
        """Record no more. False where another profiler has been started meanwhile: that one continues, this is lost.

        On the thread that has called `start`.
        """
        if not self._has_started and not is_profiler_open():
            self.start()  # what is prepared holds the device's profiler otherwise
        if _profiler_state()._is_profiler_enabled is not self:
            return False
        self._profile.__exit__(None, None, None)
        results = self._profile.kineto_results
        return results is not None and results.trace_start_ns() > 0

    def save(self, path: str) -> None:
        """Write a Chrome trace. Any thread, after a `stop` that returned True: without results torch crashes here."""
        self._profile.export_chrome_trace(path)


def has_dispatch_mode() -> bool:
    """Whether something sees each operation of this thread: fake tensors, a counter of FLOPs."""
    return bool(torch._C._len_torch_dispatch_stack())


def may_be_compiled() -> bool:
    """Whether this process has loaded the compiler: an operation of a graph is not seen where it runs."""
    return "torch._dynamo" in sys.modules


def loader_iterator() -> Any:
    """Return the class of the iterators of every `DataLoader`."""
    return torch.utils.data.dataloader._BaseDataLoaderIter


# ---- FLOPs ----


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Return the floating-point operations of products of matrices, of convolutions and of attention; else 0.

    As torch's own counter has them. Of attention on a CPU, which the counter leaves out, its formulas are used.
    """
    # It imports triton, 0.15 s that only those pay who count.
    flop_counter = importlib.import_module("torch.utils.flop_counter")
    name = func.overloadpacket.__name__
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return int(flop_counter.sdpa_flop_count(*(each.shape for each in args[:3])))
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return int(flop_counter.sdpa_backward_flop_count(*(each.shape for each in args[:4])))
    count = flop_counter.flop_registry.get(func.overloadpacket)
    if count is None and name == "_grouped_mm":  # which the counter leaves out: each row, or column, is in one group
        left, right = (each.shape for each in args[:2])
        num_groups = left[0] if len(left) == len(right) == 3 else 1
        return int(2 * num_groups * left[-2] * left[-1] * right[-1])
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


class FlopMode(TorchDispatchMode):
    """Adds up the FLOPs of the operations within it: torch's own counter also says of which module, which costs more.

    Of that, above all: a mode imports torch._dynamo at its first operation, 1.5 s, unless its function has the mark.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    @_outside_dynamo
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += flops_of(func, args, kwargs or {}, result)
        return result


# ---- torch.compile ----


def outside_graphs(hook: _F) -> _F:
    """Decorate a hook: where a compiled forward calls it, the graph ends there and the hook runs as Python.

    As `torch.compiler.disable` does, but without importing the compiler (1.5 s) where nothing is compiled.
    """

    disabled: Callable[..., Any] | None = None

    @functools.wraps(hook)
    def outside(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None and "torch._dynamo" in sys.modules:
            disabled = torch.compiler.disable(hook)
            # Or it compiles this function too, once for each number of arguments, and warns that these are many.
            torch._dynamo.decorators.skip(outside)
        return (disabled or hook)(*args, **kwargs)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]  # what torch.compile looks for
    return outside  # type: ignore[return-value]


def records_cuda_graphs(module: nn.Module) -> bool:
    """Whether torch.compile was asked to record CUDA graphs of a module: mode "reduce-overhead" or "max-autotune"."""
    for compiled in (module._compiled_call_impl, module):
        ask = getattr(compiled, "get_compiler_config", None)
        config = None if ask is None else ask()  # None of a backend other than inductor
        if config and config.get("triton.cudagraphs"):
            return True
    return False


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Keep the construction of optimizers from importing torch._dynamo: 1.5 to 2 s of CPU of each rank.

    `Optimizer.add_param_group` imports it only to be left out of compiled code, unless its function has the mark of
    that already (torch/_compile.py). The mark is taken away again: what is compiled later is as in torch. Where
    another torch knows no such mark, the import takes place.
    """
    function = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if function is None or hasattr(function, _DYNAMO_MARK) or "torch._dynamo" in sys.modules:
        yield
        return
    setattr(function, _DYNAMO_MARK, function)
    try:
        yield
    finally:
        delattr(function, _DYNAMO_MARK)
