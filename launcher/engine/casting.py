"""What the forward computes in: inputs cast to the model's precision, or torch's autocast."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.zero.autocast import mark_fp32


@dataclasses.dataclass(frozen=True)
class Casting:
    """How a forward is run."""

    device_type: str
    input_dtype: torch.dtype | None = None  # floating-point inputs are cast to it; None: they are left alone
    autocast_dtype: torch.dtype | None = None  # None: no autocast

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast_dtype)

    def inputs(self, value: Any) -> Any:
        """Return what a forward is given, cast."""
        return value if self.input_dtype is None else cast_floats(value, self.input_dtype)


def buffer_dtype(own: torch.dtype, param_dtype: torch.dtype, named: torch.dtype | None) -> torch.dtype:
    """Return what a buffer of type `own` becomes. named: the config's `data_types.buffer_dtype`.

    A 16-bit model has 16-bit buffers. One in fp32 leaves them as they are, float64 for example. Integers and complex
    numbers, such as rotary frequencies, are never cast, nor is what is quantized to 8 bits or fewer.
    """
    if not own.is_floating_point or own.itemsize == 1:
        return own
    return named or (own if param_dtype == torch.float32 else param_dtype)


@contextlib.contextmanager
def buffers_kept(model: nn.Module, device: torch.device, dtype_of: Callable[[Tensor], torch.dtype]) -> Iterator[None]:
    """Take the buffers out of the model, and put them back on `device` and in the type that `dtype_of` says.

    What several modules share they share afterwards, too.
    """
    found = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for module, name, _ in found:
        module._buffers[name] = None
    try:
        yield
    finally:
        moved: dict[Tensor, Tensor] = {}
        for module, name, buffer in found:
            if buffer not in moved:
                moved[buffer] = buffer.to(device=device, dtype=dtype_of(buffer))
            module._buffers[name] = moved[buffer]


def has_shared_elements(tensor: Tensor) -> bool:
    """Whether several elements have the same memory."""
    if type(tensor.data) is not Tensor or tensor.layout != torch.strided or not tensor.numel():
        return False
    is_expanded = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return is_expanded or tensor.untyped_storage().nbytes() < tensor.nbytes


@contextlib.contextmanager
def params_left_out(model: nn.Module) -> Iterator[None]:
    """Have `model.to(...)` leave parameters alone within this block: they have no elements, and lose their gradients.

    Those that no unit takes are not left out: integers, and tensors of classes with memory of their own.
    """
    kept = [
        (param, param.data) for param in model.parameters() if param.is_floating_point() and type(param.data) is Tensor
    ]
    for param, values in kept:
        param.grad, param.data = None, values.new_empty(0)
    try:
        yield
    finally:
        for param, values in kept:
            param.data = values


def set_tf32(allowed: bool | None) -> None:
    """Let fp32 products on GPUs use TF32 (10 bits of mantissa), or forbid it; None: leave torch as it is set."""
    if allowed is not None:
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        torch.backends.cudnn.allow_tf32 = allowed


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with the floating-point tensors in nested lists, tuples and dictionaries cast to `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping) and type(value) is dict:
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(cast_floats(item, dtype) for item in value)
    return value


def keep_autocast_to(model: nn.Module, class_paths: Sequence[str], device_type: str) -> None:
    """Have autocast act in modules of the named classes only: other modules with parameters compute in fp32.

    class_paths: such as "torch.nn.Linear", or class names. Raises: EngineError for a class that no module has.
    """
    found = dict.fromkeys(class_paths, False)
    for module in model.modules():
        names = [path for path in class_paths if path in _paths(type(module))]
        for path in names:
            found[path] = True
        if not names and any(True for _ in module.parameters(recurse=False)):
            _compute_in_fp32(module, device_type)
    missing = [path for path, is_there in found.items() if not is_there]
    if missing:
        raise EngineError(
            f"torch_autocast.lower_precision_safe_modules: the model has no module of class {missing[0]}",
            hint='give class paths of its modules, such as "torch.nn.Linear"',
        )


def _paths(kind: type[nn.Module]) -> set[str]:
    """Return the names of a class, and of those it inherits from, with the short path `torch.nn.X`."""
    names = set()
    for base in kind.__mro__:
        names |= {base.__name__, f"{base.__module__}.{base.__qualname__}"}
        if getattr(nn, base.__name__, None) is base:
            names.add(f"torch.nn.{base.__name__}")
    return names


def _compute_in_fp32(module: nn.Module, device_type: str) -> None:
    mark_fp32(module)
    stacks: list[contextlib.ExitStack] = []  # a module may be called within itself

    def before(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        stack = contextlib.ExitStack()
        stack.enter_context(torch.autocast(device_type, enabled=False))
        stacks.append(stack)
        return cast_floats(args, torch.float32), cast_floats(kwargs, torch.float32)

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        if stacks:
            stacks.pop().close()

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, always_call=True)
