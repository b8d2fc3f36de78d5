"""From a config section or a client's optimizer to parameter groups and a flat optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from launcher.base.errors import ConfigError, EngineError
from launcher.base.suggest import did_you_mean
from launcher.optim.adam import OPTIONS, FusedAdam
from launcher.optim.api import FlatOptimizer, FlatShard

SUPPORTED_TYPES = ("Adam", "AdamW")


@dataclass(frozen=True)
class OptimizerPlan:
    """Which optimizer to build, over which groups of the user's parameters."""

    param_groups: list[dict[str, Any]]  # "params" and every option of the optimizer
    decoupled_weight_decay: bool

    def build(self, shards: list[FlatShard]) -> FlatOptimizer:
        """Build the optimizer over this rank's shards."""
        return FusedAdam(shards, self.param_groups, decoupled_weight_decay=self.decoupled_weight_decay)


def _as_groups(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    entries = list(parameters)
    groups = [dict(entry) for entry in entries if isinstance(entry, Mapping)]
    loose = [entry for entry in entries if not isinstance(entry, Mapping)]
    for group in groups:
        params = group["params"]
        group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
    return ([{"params": loose}] if loose else []) + groups


def plan_from_config(
    type_name: str, params: Mapping[str, Any], model: nn.Module, model_parameters: Iterable[Any] | None
) -> OptimizerPlan:
    """Plan the optimizer of the config's `optimizer` section.

    model_parameters: parameters or groups of them (each may set its own lr, weight_decay, ...); None: all
    trainable parameters of `model`. Raises: ConfigError for a type this release does not have.
    """
    by_lower = {name.lower(): name for name in SUPPORTED_TYPES}
    name = by_lower.get(type_name.lower())
    if name is None:
        hint = did_you_mean(type_name, SUPPORTED_TYPES) or f"use one of {', '.join(SUPPORTED_TYPES)}"
        raise ConfigError(f'optimizer type "{type_name}" is not supported', where="optimizer.type", hint=hint)
    # DeepSpeed's "Adam" means AdamW unless adam_w_mode is false; configs in the wild rely on it.
    decoupled = name == "AdamW" or bool(params.get("adam_w_mode", True))
    defaults: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    defaults |= {key: value for key, value in params.items() if key in OPTIONS}
    defaults["betas"] = tuple(defaults["betas"])
    groups = _as_groups(model.parameters() if model_parameters is None else model_parameters)
    return OptimizerPlan([defaults | group for group in groups], decoupled)


def plan_from_client(
    optimizer: torch.optim.Optimizer | Callable[[Iterable[Any]], torch.optim.Optimizer],
    model: nn.Module,
    model_parameters: Iterable[Any] | None,
) -> OptimizerPlan:
    """Take hyper-parameters and groups over from a torch Adam or AdamW, or a function that builds one.

    Raises: EngineError for another class, or one that has state already.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(model.parameters() if model_parameters is None else model_parameters))
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise EngineError(
            f"optimizer {type(optimizer).__name__} cannot be sharded by this release",
            hint="give torch.optim.AdamW or torch.optim.Adam, or name one in the config",
        )
    if optimizer.state:
        raise EngineError("the optimizer has taken steps already", hint="call launcher.initialize before training")
    groups = [dict(group) for group in optimizer.param_groups]
    return OptimizerPlan(groups, isinstance(optimizer, torch.optim.AdamW))


def group_of_parameters(plan: OptimizerPlan, model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the group of every trainable parameter; frozen ones are left out of all groups.

    Raises: EngineError for a parameter in two groups, in none, or of another model.
    """
    names = {param: name for name, param in model.named_parameters()}
    found: dict[nn.Parameter, int] = {}
    for number, group in enumerate(plan.param_groups):
        for param in group["params"]:
            if param not in names:
                raise EngineError(
                    f"optimizer group {number} holds a parameter of shape {tuple(param.shape)} that is not the model's"
                )
            if found.setdefault(param, number) != number:
                raise EngineError(f"parameter {names[param]} is in two optimizer groups")
    for param, name in names.items():
        if param.requires_grad and param not in found:
            raise EngineError(
                f"trainable parameter {name} is in no optimizer group",
                hint="add it to a group, or freeze it with requires_grad_(False)",
            )
    return {param: number for param, number in found.items() if param.requires_grad}
