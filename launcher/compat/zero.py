"""Names around sharded parameters: of `deepspeed.runtime.zero` and its modules, and of `torch_autocast`.

What has no need of the built-in engine's machinery is here; the rest is in `launcher.zero`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.base.errors import EngineError
from launcher.compat.accelerator import get_accelerator
from launcher.config.schema import LeafModule
from launcher.engine.engine import Engine
from launcher.optim.catalog import is_known
from launcher.optim.muon.muon import as_matrix, iteration, orthogonalized
from launcher.zero import GatheredParameters, Init, TiledLinear
from launcher.zero.unit import unit_of

# Shape of a parameter that is sharded and not gathered.
partitioned_param_data_shape = [0]

DEFAULT_LEAF_MODULE_CLASSES: list[str] = LeafModule().classes
DEFAULT_LEAF_MODULE_NAMES: list[str] = LeafModule().names
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = LeafModule().name_suffixes


class ZeroParamType(Enum):
    """How a parameter is kept: whole on every rank, in parts, or on one rank."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def is_zero_supported_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ZeRO takes the steps of an optimizer without `zero_allow_untested_optimizer`."""
    return is_known(optimizer)


def is_zero_param(parameter: Any) -> bool:
    """Whether a value is a parameter of stage 3, gathered or not."""
    return isinstance(parameter, Tensor) and hasattr(parameter, "ds_id")


class MultipleAllGatherHandles:
    """Handles of gathers as one: `wait` waits for all."""

    def __init__(self, handles: Iterable[Any]) -> None:
        self.handles = list(handles)

    def wait(self, handle_dependency: bool = True) -> None:
        """handle_dependency: passed to the handles that take it."""
        for handle in self.handles:
            parameters = inspect.signature(handle.wait).parameters.values()
            takes_it = any(each.name == "handle_dependency" or each.kind is each.VAR_KEYWORD for each in parameters)
            handle.wait(**({"handle_dependency": handle_dependency} if takes_it else {}))


class MiCS_Init(Init):  # DeepSpeed's name
    """`Init` for `mics_shard_size`: `initialize()` keeps the shards on so many ranks."""


@contextlib.contextmanager
def unwrap_model_for_generation(model: Engine) -> Iterator[Engine]:
    """Return a block in which the model's parameters are gathered once, for `generate()`. Every rank must enter it."""
    with GatheredParameters(model.module.parameters()):
        yield model


# ---- linear layers ----

# For `torch.autograd.Function`s of scripts: they take the types that autocast gives them, on this process's device.
autocast_custom_fwd = functools.partial(torch.amp.custom_fwd, device_type=get_accelerator().device_name())
autocast_custom_bwd = functools.partial(torch.amp.custom_bwd, device_type=get_accelerator().device_name())


class LinearFunctionForZeroStage3:
    """torch's own linear function: the engine gathers a sharded weight for its backward."""

    apply = staticmethod(F.linear)


zero3_linear_wrap = F.linear


class LinearModuleForZeroStage3(nn.Linear):
    """torch's own linear layer."""


class TiledLinearReturnBias(TiledLinear):
    """Tiles of a class that returns its bias beside the output, not added."""

    def forward(self, inputs: Any) -> tuple[Any, Any]:  # type: ignore[override]  # two results
        """Return [..., out_features] or its parts, and the whole bias or its parts, None without one."""
        parts = self.parts_of(inputs)
        outputs, biases = [], []
        for row in self.linears:
            terms, found = zip(*(tile(part) for tile, part in zip(row, parts, strict=True)), strict=True)
            outputs.append(cast("Tensor", sum(terms[1:], start=terms[0])))
            biases.append(found[-1])
        has_bias = biases[0] is not None
        if not self.combine_out_splits:
            return outputs, biases if has_bias else None
        return torch.cat(outputs, dim=-1), torch.cat(biases, dim=-1) if has_bias else None


# ---- types of what is sent ----

PARAM_COMM_DTYPE_ATTR_NAME = "comm_dtype"


def has_comm_dtype(param: nn.Parameter) -> bool:
    """Whether a parameter is gathered in another type than it is kept in: that of `torch_autocast`, at stage 3."""
    return _gathered_dtype(param) is not None


def get_comm_dtype(param: nn.Parameter) -> torch.dtype:
    """Return the type in which a parameter is gathered."""
    return _gathered_dtype(param) or param.dtype


def get_allgather_dtype(param: nn.Parameter, param_ds_tensor: Tensor) -> torch.dtype:
    """Return the type in which a parameter is gathered whose shard is `param_ds_tensor`."""
    return _gathered_dtype(param) or param_ds_tensor.dtype


def _gathered_dtype(param: nn.Parameter) -> torch.dtype | None:
    unit = unit_of(param)
    return None if unit is None else unit.gathered_dtype


# ---- Muon ----


def muon_update(
    grad: Tensor,
    momentum: Tensor,
    beta: float = 0.95,
    ns_steps: int = 5,
    nesterov: bool = True,
    ns_method: str = "gram",
    is_expert_group: bool = False,
) -> Tensor:
    """Return the direction of one step of Muon for a matrix, in the type of `grad`; `momentum` is brought up to date.

    grad: [rows, columns], or [rows, ...], which counts as a matrix; with `is_expert_group` [experts, rows, columns].
    It is changed where `nesterov` is on.
    """
    momentum.lerp_(grad, 1 - beta)
    update = grad.lerp_(momentum, beta) if nesterov else momentum
    if is_expert_group:
        return torch.stack([_orthogonalized(each, ns_method, ns_steps) for each in update])
    return _orthogonalized(update, ns_method, ns_steps)


def _orthogonalized(update: Tensor, method: str, num_steps: int) -> Tensor:
    rows, columns = as_matrix(update.shape)
    how = iteration({"ns_method": method}, update.device)
    if num_steps != how.num_steps:
        raise EngineError(f"muon_update: ns_steps is {num_steps}", hint=f"the engine takes {how.num_steps}")
    matrix = orthogonalized(update.reshape(rows, columns).to(how.dtype), how)
    scaled: Tensor = matrix * max(1, rows / columns) ** 0.5
    return scaled.to(update.dtype)
