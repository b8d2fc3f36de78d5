"""Help for scripts by DeepSpeed's names: seeds, norms, devices, leaf modules, gradients, loaders."""

from __future__ import annotations

import functools
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.torch_version import TorchVersion

from launcher.activation import configure
from launcher.base.errors import EngineError, EngineRuntimeError, EngineValueError
from launcher.base.log import get_logger
from launcher.comm.device import local_device
from launcher.comm.mesh import current_mesh
from launcher.comm.torch_internals import is_executed, is_in_backward
from launcher.compat.accelerator import get_accelerator
from launcher.compat.ranks import get_rank
from launcher.moe import is_moe_param
from launcher.monitor.meters import GIB, memory_use
from launcher.zero import safe_get_full_grad, safe_set_full_grad, set_z3_leaf_module

_P = ParamSpec("_P")
_R = TypeVar("_R")


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log on rank 0 what this process uses of its device. Only with `force`: calls without it stay in scripts."""
    if force and get_rank() == 0:
        use = memory_use(local_device())
        get_logger().info("%s: %s in use, at most %.2f GiB so far", message, use, use.peak_bytes / GIB)


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy where it is installed, and torch on every device. A seed may have any size."""
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(seed % 2**32)  # it refuses larger ones
    torch.manual_seed(seed % 2**63)


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Return the 2-norm of a whole from the 2-norms of its parts.

    Infinity where one of them says that gradients overflowed: -1, infinity or NaN.
    """
    norms = [float(norm) for norm in norm_list]
    return math.hypot(*norms) if all(math.isfinite(norm) and norm >= 0 for norm in norms) else math.inf


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Scale gradients of plain parameters down to `max_norm`; return their norm before. The engine clips its own.

    Where there are experts among them, which differ between ranks, every rank of a set of experts must call it: the
    norm counts all of theirs. Raises: EngineError for `mpu`.
    """
    if mpu is not None:
        raise EngineError("clip_grad_norm_(mpu=...) is not supported", hint="use data parallelism alone")
    given: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    experts = [param for param in given if is_moe_param(param)]
    mesh = current_mesh()
    if not experts or mesh is None or mesh.expert is None:
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)
    grads = [param.grad for param in experts if param.grad is not None]  # none where no token came to this rank
    own = torch.nn.utils.get_total_norm(grads, norm_type).to(experts[0].device, torch.float32)
    everywhere = own.repeat(mesh.expert.world_size)
    dist.all_gather_into_tensor(everywhere, own.view(1), mesh.expert.process_group)
    shared = [param.grad for param in given if param.grad is not None and not is_moe_param(param)]
    norm = torch.nn.utils.get_total_norm([*shared, everywhere], norm_type)
    torch.nn.utils.clip_grads_with_norm_(given, max_norm, norm)
    return norm


def count_used_parameters_in_backward(parameters: Iterable[Any]) -> int:
    """Return how many of the parameters the backward that runs will reach. Raises: EngineRuntimeError without one."""
    if not is_in_backward():
        raise EngineRuntimeError("count_used_parameters_in_backward(): no backward runs", hint="call it in a hook")
    trained = [param for param in parameters if isinstance(param, Tensor) and param.requires_grad]
    with torch.enable_grad():
        nodes = {get_gradient_edge(param).node for param in trained}
    return sum(map(is_executed, nodes))


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return the one value that all items have. Raises: RuntimeError where they have several, or none."""
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"one value was expected, got {sorted(map(repr, found))}")
    return found.pop()


def move_to_device(item: Any, device: torch.device | str) -> Any:
    """Return `item` with its tensors on `device`; lists, tuples and dicts are copied, modules are moved."""
    return copy_to_device(item, device, lambda value: isinstance(value, Tensor | nn.Module))


def copy_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool]) -> Any:
    """Return `item` with what `criterion_func` holds for on `device`; lists, tuples and dicts are copied."""
    if criterion_func(item):
        return item.to(device)
    if isinstance(item, list | tuple):
        values = [copy_to_device(value, device, criterion_func) for value in item]
        return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
    if isinstance(item, Mapping):
        return {key: copy_to_device(value, device, criterion_func) for key, value in item.items()}
    return item


def get_global_norm_of_tensors(input_tensors: Iterable[Tensor], norm_type: float = 2) -> Tensor:
    """Return the norm of all tensors together, of this process."""
    return torch.nn.utils.get_total_norm(list(input_tensors), norm_type)


def clip_tensors_by_global_norm(
    input_tensors: Sequence[Tensor], max_norm: float = 1.0, global_norm: float | Tensor | None = None, eps: float = 1e-6
) -> float | Tensor:
    """Scale tensors in place down to a norm of all together; return their norm before, computed where not given."""
    norm = get_global_norm_of_tensors(input_tensors) if global_norm is None else global_norm
    factor = max_norm / (float(norm) + eps)
    if factor < 1:
        torch._foreach_mul_([tensor.detach() for tensor in input_tensors], factor)
    return norm


def ensure_directory_exists(filename: str | os.PathLike[str]) -> None:
    """Make the folder of a file. Raises: OSError."""
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Do what `configure(partition_activations=...)` of activation checkpointing does."""
    configure(partition_activations=partition_activation)


def set_num_layers(nlayers: int) -> None:
    """Do what `configure(num_checkpoints=...)` of activation checkpointing does."""
    configure(num_checkpoints=nlayers)


def empty_cache() -> None:
    """Give unused memory of the device's allocator back."""
    get_accelerator().empty_cache()


def instrument_w_nvtx(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return `func` such that its calls are ranges of its name in a trace of torch's profiler."""

    @functools.wraps(func)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.profiler.record_function(func.__qualname__):
            return func(*args, **kwargs)

    return wrapped


class OnDevice:
    """What is built inside is on `device`, and its floating-point parameters in `dtype`, by torch's own defaults."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled

    def __enter__(self) -> None:
        if self.enabled:
            self._saved = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self.device.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.enabled:
            self.device.__exit__(kind, error, trace)
            torch.set_default_dtype(self._saved)


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return `item` with every tensor in it copied to `device`; lists, tuples and dicts of any depth are copied.

    A tensor that occurs several times is copied once, so that tied weights stay tied.
    """
    return _cloned(item, torch.device(device), {})


def _cloned(item: Any, device: torch.device, seen: dict[int, torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        if id(item) not in seen:
            seen[id(item)] = item.detach().to(device, copy=True)
        return seen[id(item)]
    if isinstance(item, list | tuple):
        values = [_cloned(value, device, seen) for value in item]
        return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
    if isinstance(item, Mapping):
        return type(item)((key, _cloned(value, device, seen)) for key, value in item.items())  # type: ignore[call-arg]
    return item


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the gradient that the next step will see by `update_func(gradient, parameter)`, for each parameter.

    Collective: every rank must call it, between `engine.backward` of the last micro-batch and `engine.step`, with a
    function that returns the same on every rank. Parameters without a gradient are left out.
    """
    for param in param_list:
        grad = safe_get_full_grad(param) if param.requires_grad else None
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


_Found = tuple[list[nn.Module], list[str]]


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> _Found:
    """Have modules of these names gathered as one, or not; return them, and the names that no module has.

    Call it before `initialize`. Raises: EngineError for such a name, unless `raise_if_not_found` is False.
    """
    return _set(model, module_names, flag, raise_if_not_found, lambda name, wanted: name == wanted)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> _Found:
    """Do the same for modules whose names end so."""
    return _set(model, module_name_suffixes, flag, raise_if_not_found, str.endswith)


def _set(
    model: nn.Module, wanted: Sequence[str], flag: bool, raises: bool, matches: Callable[[str, str], bool]
) -> _Found:
    modules = dict(model.named_modules())
    found = list(dict.fromkeys(modules[name] for word in wanted for name in modules if matches(name, word)))
    missing = [word for word in wanted if not any(matches(name, word) for name in modules)]
    if missing and raises:
        raise EngineValueError(f"the model has no module named {missing[0]}", hint="see model.named_modules()")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing


class RepeatingLoader:
    """Iterates over a loader again and again. Raises: StopIteration only where the loader is empty."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)


def zero_wrapper_for_fp_tensor_constructor(
    constructor: Callable[..., Tensor], target_fp_dtype: torch.dtype
) -> Callable[..., Tensor]:
    """Return `constructor`: `Init` converts parameters once they are built, and replaces no constructor of torch.

    transformers replaces this function while it builds a model, so that `torch.arange` keeps its type; it does here.
    """
    del target_fp_dtype
    return constructor


def required_torch_version(min_version: str | float | None = None, max_version: str | float | None = None) -> bool:
    """Whether torch is at least, and at most, of a version. Raises: AssertionError without either."""
    if min_version is None and max_version is None:
        raise AssertionError("required_torch_version() needs min_version or max_version")
    own = TorchVersion(torch.__version__)
    is_enough = min_version is None or own >= str(min_version)
    return is_enough and (max_version is None or own <= str(max_version))
