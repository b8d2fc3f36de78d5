"""Which kernels an engine trusts on its device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from launcher.base.log import get_logger
from launcher.comm import collectives
from launcher.comm.groups import RankGroup
from launcher.kernels.api import Kernel
from launcher.kernels.check import SpanTypes, update_problem
from launcher.optim.api import ParamShard
from launcher.optim.factory import OptimizerPlan
from launcher.optim.rules import RULES, states_of


def trusted_kernel(
    kernel: Kernel | None,
    plan: OptimizerPlan,
    shards: Sequence[ParamShard],
    state_dtype: torch.dtype,
    group: RankGroup,
) -> Kernel | None:
    """Return a kernel of the group's device if it takes the plan's steps as the reference does on every rank.

    group: all ranks, of other stages and tensor parts too: what they have alike must be updated alike.
    Else None: torch's own optimizer or the reference serves, which rank 0 says. Every rank must call it.
    """
    if plan.kind is None:
        return kernel
    problem = None if kernel is None else _problem(kernel, plan, shards, state_dtype, group.device)
    num_wrong = sum(collectives.gather_scalars(group, float(kernel is None or problem is not None)))
    if num_wrong and group.rank == 0 and kernel is not None:
        why = problem or f"is missing or computes other steps than the reference on {num_wrong:.0f} other ranks"
        get_logger().warning("the kernel %s %s: it is not used, torch updates the parameters", kernel.name, why)
    return None if num_wrong else kernel


def _problem(
    kernel: Kernel, plan: OptimizerPlan, shards: Sequence[ParamShard], state_dtype: torch.dtype, device: torch.device
) -> str | None:
    """Say what is wrong with the kernel for the types and the rules of this rank's shards on the device."""
    assert plan.kind is not None
    there = [shard for shard in shards if shard.owned and shard.master.device.type == device.type]
    types = {
        SpanTypes(shard.master.dtype, shard.grad.dtype, state_dtype, None if shard.param is None else shard.param.dtype)
        for shard in there
    }
    rules = {type(rule): rule for rule in (RULES[plan.kind](group, 2) for group in plan.param_groups)}
    try:
        for rule in rules.values():
            for each in types:
                problem = update_problem(kernel, rule, len(states_of(rule)), each, device)
                if problem is not None:
                    return problem
    except Exception as error:  # noqa: BLE001  # compiled at its first call; all ranks wait for what this one has found
        return f"does not run here: {(str(error) or type(error).__name__).splitlines()[0]}"
    return None
