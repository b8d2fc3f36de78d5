"""The optimizers with one-bit communication by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from launcher.comm.groups import RankGroup
from launcher.config.schema_optimizers import OPTIMIZER_PARAMS
from launcher.optim.api import FlatOptimizer, ParamShard
from launcher.optim.factory import OptimizerBackend, OptimizerPlan, as_groups
from launcher.optim.onebit.adam import OneBitAdam
from launcher.optim.onebit.flat import OneBitFlat
from launcher.optim.onebit.lamb import OneBitLamb
from launcher.optim.onebit.zero_one import ZeroOneAdam

ONE_BIT: dict[str, type[OneBitFlat]] = {kind.title: kind for kind in (OneBitAdam, ZeroOneAdam, OneBitLamb)}

# What a parameter group may set for itself; the rest of the params are about all ranks and parameters together.
_GROUP_OPTIONS = ("lr", "betas", "eps", "weight_decay", "bias_correction", "eps_inside_sqrt", "max_coeff", "min_coeff")


def one_bit_plan(
    name: str,
    params: Mapping[str, Any],
    model: nn.Module,
    model_parameters: Iterable[Any] | None,
    group: RankGroup,
) -> OptimizerPlan:
    """Plan the optimizer `name` of `ONE_BIT`, whose ranks are those of `group`.

    model_parameters: parameters or groups of them; None: all trainable parameters of `model`.
    """
    options = dict(OPTIMIZER_PARAMS[name].model_validate(dict(params)))
    defaults = {key: options[key] for key in _GROUP_OPTIONS if key in options}
    given = as_groups(model.parameters() if model_parameters is None else model_parameters)
    groups = [{**defaults, **group_options} for group_options in given]

    def build(shards: list[ParamShard], _means: OptimizerBackend) -> FlatOptimizer:
        return ONE_BIT[name](shards, param_groups=groups, group=group, options=options)

    return OptimizerPlan(name, groups, defaults, build)
