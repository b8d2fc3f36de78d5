"""Parameters of experts apart from the others, for optimizers with groups: DeepSpeed's `deepspeed.moe.utils`.

The engine needs no such groups: it keeps experts in units of their own, whatever groups they are in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.parallel.expert.layer import MoE
from launcher.sharding.layout import unsharded_numel
from launcher.zero.marks import is_moe_param

MAX_GROUP_NUMEL = 178_956_971  # DeepSpeed's


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether a model has a layer of `launcher.moe.MoE`, and the number of experts of the first, or 0."""
    first = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return first is not None, 0 if first is None else first.num_experts


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that every rank has, and those of experts."""
    given = list(params)
    return [param for param in given if not is_moe_param(param)], [param for param in given if is_moe_param(param)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of parameters that have one, in their type: of those every rank has, and of experts."""
    shared, experts = split_params_into_shared_and_expert_params(group)
    found = [[param.grad.to(param.dtype) for param in params if param.grad is not None] for params in (shared, experts)]
    return found[0], found[1]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]], max_group_size: float | None = MAX_GROUP_NUMEL
) -> list[dict[str, Any]]:
    """Return optimizer groups with the parameters of experts in groups of their own, marked by "moe": True.

    param_groups: each with "params", and with "name". The groups of experts have the options of the group they come
    from, the name of their set of ranks, and at most `max_group_size` elements unless one parameter has more.
    """
    given = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    shared, of_experts = [], []
    for group in given:
        others, experts = split_params_into_shared_and_expert_params(group["params"])
        shared.append({**group, "params": others})
        by_name: dict[str, list[nn.Parameter]] = {}
        for param in experts:
            by_name.setdefault(str(getattr(param, "group_name", "experts")), []).append(param)
        for name, params in by_name.items():
            of_experts += [
                {**group, "name": name, "moe": True, "params": part} for part in _parts(params, max_group_size)
            ]
    return shared + of_experts


def _parts(params: list[nn.Parameter], max_numel: float | None) -> list[list[nn.Parameter]]:
    parts: list[list[nn.Parameter]] = [[]]
    numel = 0
    for param in params:
        own = unsharded_numel(param)
        if parts[-1] and max_numel is not None and numel + own > max_numel:
            parts.append([])
            numel = 0
        parts[-1].append(param)
        numel += own
    return parts


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Whether an optimizer group is one of experts."""
    return bool(param_group.get("moe", False))


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Return optimizer groups of parameters, or of groups of them, with those of experts in groups of their own.

    Groups that are divided already stay as they are. Raises: EngineError for anything else.
    """
    if not isinstance(model_parameters, list) or not all(
        isinstance(entry, Tensor | dict) for entry in model_parameters
    ):
        raise EngineError(
            "parameters for groups of experts are a list of tensors, or of dicts with params",
            hint="configure_moe_param_groups(list(model.parameters()))",
        )
    if not model_parameters or isinstance(model_parameters[0], Tensor):
        return split_params_into_different_moe_groups_for_optimizer(
            {"params": model_parameters, "name": "dense-params"}
        )
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)
