"""Help for scripts by DeepSpeed's names: logging, seeds, norms, devices, leaf modules, gradients, loaders."""

from __future__ import annotations

import functools
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError, EngineValueError
from launcher.base.log import get_logger
from launcher.comm.device import local_device
from launcher.compat.accelerator import get_accelerator
from launcher.compat.ranks import get_rank
from launcher.monitor.memory import GIB, memory_use
from launcher.zero import safe_get_full_grad, safe_set_full_grad, set_z3_leaf_module


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

    Raises: EngineError for `mpu`.
    """
    if mpu is not None:
        raise EngineError("clip_grad_norm_(mpu=...) is not supported", hint="use data parallelism alone")
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_only_unique_item(items: Iterable[Any]) -> Any:
    """Return the one value that all items have. Raises: RuntimeError where they have several, or none."""
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"one value was expected, got {sorted(map(repr, found))}")
    return found.pop()


def move_to_device(item: Any, device: torch.device | str) -> Any:
    """Return `item` with its tensors on `device`; lists, tuples and dicts are copied, modules are moved."""
    if isinstance(item, Tensor | nn.Module):
        return item.to(device)
    if isinstance(item, list | tuple):
        values = [move_to_device(value, device) for value in item]
        return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
    if isinstance(item, Mapping):
        return {key: move_to_device(value, device) for key, value in item.items()}
    return item


def empty_cache() -> None:
    """Give unused memory of the device's allocator back."""
    get_accelerator().empty_cache()


logger = get_logger()  # the engine's own: a level that is set here holds for its lines


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on the given ranks; None or [-1]: on all."""
    rank = get_rank()
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[rank %d] %s", rank, message)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Do what `log_dist` does, at the first call with these arguments."""
    _log_once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def _log_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


@functools.cache
def warning_once(message: str, *args: Any) -> None:
    """Log a warning at the first call with these arguments."""
    logger.warning(message, *args)


# Scripts call them at the logger, too.
logger.log_dist_once = log_dist_once  # type: ignore[attr-defined]
logger.warning_once = warning_once  # type: ignore[attr-defined]


def print_rank_0(message: str) -> None:
    """Log `message` on rank 0."""
    log_dist(message, [0])


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of the engine's logger, such as "warning". Raises: EngineError for an unknown level."""
    level = logging.getLevelName(log_level_str.upper())
    if not isinstance(level, int):
        raise EngineError(f'unknown log level "{log_level_str}"', hint="use debug, info, warning, error or critical")
    (custom_logger or logger).setLevel(level)


_P = ParamSpec("_P")
_R = TypeVar("_R")


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
