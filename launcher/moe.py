"""Mixtures of experts for models of your own: a layer whose experts are sharded over ranks, and helpers.

Names and meaning are those of DeepSpeed's `deepspeed.moe.layer` and `deepspeed.moe.utils`.
"""

from launcher.parallel.expert.layer import MoE
from launcher.parallel.expert.parameters import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param_group,
    split_params_grads_into_shared_and_expert_params,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)
from launcher.zero.marks import is_moe_param

__all__ = [
    "MoE",
    "configure_moe_param_groups",
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_grads_into_shared_and_expert_params",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]
