"""Optimizers of µP, whose rates follow the width of each layer: `MuAdam`, `MuAdamW`, `MuSGD` of the package mup."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from launcher.base.errors import ConfigError
from launcher.optim.factory import OptimizerPlan, ZeroRules, as_tuples, plan_from_client

MUP_TYPES = ("MuAdam", "MuAdamW", "MuSGD")


def mup_plan(
    type_name: str, params: Mapping[str, Any], model: nn.Module, model_parameters: Iterable[Any] | None
) -> OptimizerPlan:
    """Plan the optimizer that mup builds: torch's Adam, AdamW or SGD, with a group for each width.

    Its rates are of the parameters' shapes as `mup.set_base_shapes(model, ...)` has noted them, before `initialize`.
    Raises: ConfigError where mup is not installed, or the model has no base shapes.
    """
    try:
        build = getattr(importlib.import_module("mup"), type_name)
    except ImportError as error:
        raise ConfigError(
            f"optimizer type {type_name} is of the package mup, which cannot be imported: {error}",
            where="optimizer.type",
            hint="pip install mup",
        ) from None
    trained = list(model.parameters() if model_parameters is None else model_parameters)
    try:
        built = build(trained, **as_tuples(params))
    except AssertionError as error:  # mup asserts that each parameter has the mark of set_base_shapes
        raise ConfigError(str(error), where="optimizer.type", hint="call mup.set_base_shapes(model, ...)") from None
    return plan_from_client(built, model, None, ZeroRules(stage=0))
