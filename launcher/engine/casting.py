"""What the forward computes in: inputs cast to the model's precision, or torch's autocast."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.comm.groups import RankGroup
from launcher.comm.mesh import ParallelMesh
from launcher.config.policies import DType, Precision
from launcher.config.schema import Config
from launcher.parallel.expert.placement import expert_buffers
from launcher.zero.gathered import register_outside
from launcher.zero.marks import is_moe_param
from launcher.zero.parameters import unit_params_of
from launcher.zero.partition import mark_fp32
from launcher.zero.states import TORCH_DTYPES, dtype_of

_WIDE = (torch.float32, torch.float64)


@dataclasses.dataclass(frozen=True)
class Casting:
    """How a forward is run."""

    device_type: str
    input_dtype: torch.dtype | None = None  # floating-point inputs are cast to it; None: they are left alone
    autocast_dtype: torch.dtype | None = None  # None: no autocast
    mixed_types: str = ""  # what an error in a forward is followed by: buffers have another type than parameters

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward."""
        if self.autocast_dtype is not None:
            return torch.autocast(self.device_type, dtype=self.autocast_dtype)
        return _explained(self.mixed_types) if self.mixed_types else contextlib.nullcontext()

    def inputs(self, value: Any) -> Any:
        """Return what a forward is given, cast."""
        return value if self.input_dtype is None else cast_floats(value, self.input_dtype)


@contextlib.contextmanager
def _explained(mixed_types: str) -> Iterator[None]:
    """Say what may be the cause of an error about types, which names no tensor."""
    try:
        yield
    except RuntimeError as error:
        if re.search(r"type.*(BFloat16|Half)", str(error), re.DOTALL) or "mixed dtype" in str(error):
            get_logger().error("%s", mixed_types)
        raise


def mixed_types_hint(model: nn.Module, param_dtype: torch.dtype) -> str:
    """Return what to do about buffers in fp32 or fp64 beside 16-bit parameters; "" where there are none."""
    others = {name: buffer.dtype for name, buffer in model.named_buffers() if buffer.dtype in _WIDE}
    if param_dtype in _WIDE or not others:
        return ""
    name, dtype = next(iter(others.items()))
    short = "bf16" if param_dtype == torch.bfloat16 else "fp16"
    return (
        f"the forward may have mixed types: parameters are {param_dtype}, and {len(others)} buffers have kept their"
        f" type, such as {name} ({dtype}). Build the model in 16 bits, as from_pretrained(dtype={param_dtype}) does; or"
        f' cast that buffer before initialize(); or all of them with "data_types": {{"buffer_dtype": "{short}"}}'
    )


def buffer_dtype(own: torch.dtype, configured: torch.dtype | None) -> torch.dtype:
    """Return what a buffer of type `own` becomes. configured: the config's `data_types.buffer_dtype`.

    Without it buffers keep their type, as in DeepSpeed 0.19: rotary frequencies and running statistics are in fp32 on
    purpose, and 8 bits of mantissa turn a token at position 4,000 by a wrong angle. Integers and complex numbers are
    never cast, nor is what is quantized to 8 bits or fewer.
    """
    return own if configured is None or not own.is_floating_point or own.itemsize == 1 else configured


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


def widen_batch_norms(model: nn.Module, dtype_of: Callable[[nn.Parameter], torch.dtype]) -> None:
    """Have batch norms read their weights in the type of their running statistics.

    Torch normalises a 16-bit input with weights and statistics of one type, and raises where only the statistics are in
    fp32. dtype_of: the type that a parameter is going to have.
    """
    for module in model.modules():
        weight, mean = module._parameters.get("weight"), module._buffers.get("running_mean")
        is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        if not is_batch_norm or weight is None or mean is None or dtype_of(weight) == mean.dtype:
            continue
        own = module.__dict__.get("forward")
        if not isinstance(own, functools.partial) or own.func is not _with_wide_weights:  # of an engine before
            module.forward = functools.partial(_with_wide_weights, module, module.forward)


def _with_wide_weights(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    own, mean = module._parameters, module._buffers["running_mean"]
    assert mean is not None
    wide: Any = {name: None if param is None else param.to(mean.dtype) for name, param in own.items()}
    module._parameters = wide
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters = own


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
    """Let fp32 products on GPUs use TF32 (10 bits of mantissa), or forbid it; None: leave torch as it is set.

    Torch has two sets of switches from 2.9 on, and raises where it reads one that contradicts the other. Those of an
    operation count before `torch.backends.fp32_precision`, which transformers sets.
    """
    if allowed is None:
        return
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    cudnn = torch.backends.cudnn
    cudnn.allow_tf32 = allowed
    operations: list[Any] = [torch.backends.cuda.matmul, *(getattr(cudnn, name, None) for name in ("conv", "rnn"))]
    for operation in operations:
        if hasattr(operation, "fp32_precision"):
            operation.fp32_precision = "tf32" if allowed else "ieee"


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

    class_paths: such as "torch.nn.Linear", or class names. Raises: EngineError for one that neither a module has nor
    can be imported.
    """
    found = dict.fromkeys(class_paths, False)
    for module in model.modules():
        names = [path for path in class_paths if path in _paths(type(module))]
        for path in names:
            found[path] = True
        if not names and any(True for _ in module.parameters(recurse=False)):
            _compute_in_fp32(module, device_type)
    missing = [path for path, is_there in found.items() if not is_there and not _is_class(path)]
    if missing:
        raise EngineError(
            f"torch_autocast.lower_precision_safe_modules: there is no class {missing[0]}, in the model or elsewhere",
            hint='give class paths of its modules, such as "torch.nn.Linear"',
        )


def _is_class(path: str) -> bool:
    """Whether a class can be imported by its path."""
    module, _, name = path.rpartition(".")
    try:
        return isinstance(getattr(importlib.import_module(module), name, None), type)
    except (ImportError, ValueError):
        return False


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


# ---- Building: the tensors of a model get their types and places ----


def place_buffers(model: nn.Module, settings: Config, precision: Precision, mesh: ParallelMesh) -> None:
    """Bring everything but parameters to the device, buffers in their configured type and with rank 0's values.

    Those of experts get the values of the first rank that has the same experts. Parameters stay where they are until
    their unit is built: the device may not hold them all.
    """
    buffers = settings.data_types.buffer_dtype
    configured = None if buffers is None else TORCH_DTYPES[DType(buffers)]
    with (
        params_left_out(model),
        buffers_kept(model, mesh.data.device, lambda buffer: buffer_dtype(buffer.dtype, configured)),
    ):
        model.to(device=mesh.data.device, dtype=TORCH_DTYPES[precision.param])
    widen_batch_norms(model, partial(dtype_of, precision))
    for buffer in model.buffers():
        if has_shared_elements(buffer):  # as `expand` makes them: nothing can be written to one of them alone
            buffer.data = buffer.data.contiguous()
    of_experts = expert_buffers(model)
    others = [buffer for buffer in model.buffers() if all(buffer is not each for each in of_experts)]
    (mesh.layers or mesh.world).communicator.broadcast([buffer.data for buffer in others])
    (mesh.of_experts or mesh).data.communicator.broadcast([buffer.data for buffer in of_experts])


def place_frozen(model: nn.Module, precision: Precision, mesh: ParallelMesh) -> None:
    """Bring frozen parameters, which are in no unit, to the device, in their type and with rank 0's values."""
    others = [param for param in model.parameters() if unit_params_of(param) is None]
    for param in others:
        param.data = param.data.to(device=mesh.data.device, dtype=dtype_of(precision, param))
    of_experts = [param for param in others if is_moe_param(param)]
    of_all = [param for param in others if not is_moe_param(param)]
    for params, own_mesh in ((of_all, mesh), (of_experts, mesh.of_experts or mesh)):
        own_mesh.data.communicator.broadcast([param.data for param in params])
        register_outside(params, own_mesh)


def casting_of(model: nn.Module, settings: Config, precision: Precision, group: RankGroup) -> Casting:
    """Return how forwards are run, by the config."""
    device_type = group.device.type
    modules = settings.torch_autocast.lower_precision_safe_modules
    if modules is not None and settings.torch_autocast.enabled:
        keep_autocast_to(model, modules, device_type)
    casts_inputs = settings.fp16.enabled and settings.fp16.auto_cast
    param_dtype = TORCH_DTYPES[precision.param]
    return Casting(
        device_type,
        param_dtype if casts_inputs else None,
        None if precision.autocast is None else TORCH_DTYPES[precision.autocast],
        mixed_types_hint(model, param_dtype),
    )
