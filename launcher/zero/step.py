"""The optimizer step over owned ranges: norm, clip, update, publish."""

from __future__ import annotations

import math

import torch

from launcher.comm import collectives
from launcher.comm.groups import DataParallelGroup
from launcher.optim.api import FlatOptimizer
from launcher.zero.stages import ZeroPolicy
from launcher.zero.unit import FlatUnit

# Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does.
CLIP_EPSILON = 1e-6


def global_grad_norm(units: list[FlatUnit], policy: ZeroPolicy, group: DataParallelGroup) -> float:
    """Return the 2-norm of all gradients, each element counted once; the same bits on every rank.

    Every rank must call it after the reductions have finished.
    """
    if not units:
        return 0.0
    # Norms of units in fp32 (a fp64 sum is 40 times slower on a CPU), their squares in fp64.
    norms = torch._foreach_norm([unit.owned_grad for unit in units])
    total = torch.stack(list(norms)).double().square().sum().reshape(1)
    if policy.stage.shards_optimizer:
        total = collectives.sum_scalars(group, total)
    return math.sqrt(total.item())


def step_units(units: list[FlatUnit], optimizer: FlatOptimizer, policy: ZeroPolicy, group: DataParallelGroup) -> float:
    """Take one optimizer step and return the gradient norm before clipping. Every rank must call it.

    When the norm is not finite nothing is updated: one bad micro-batch must not destroy the weights.
    """
    norm = global_grad_norm(units, policy, group)
    if math.isfinite(norm):
        coefficient = policy.max_grad_norm / (norm + CLIP_EPSILON)
        if policy.max_grad_norm > 0 and coefficient < 1.0:
            torch._foreach_mul_([unit.owned_grad for unit in units], coefficient)
        optimizer.step()
        for unit in units:
            unit.publish_update()
            if not policy.overlap_comm:
                unit.wait_for_parameters()
    for unit in units:
        unit.discard_gradients()
    return norm


def first_bad_gradient(units: list[FlatUnit], group: DataParallelGroup) -> str | None:
    """Return the name of the first parameter whose summed gradient has an element that is not finite.

    Every rank must call it, after `step_units` has skipped a step: the gradients still stand where they were.
    """
    names = [name for unit in units for name in unit.members.names]
    found, number = len(names), 0
    for unit in units:
        for slot, shared in unit.layout.slots_in(unit.owned):
            grad = unit.owned_grad[shared.start - unit.owned.start : shared.stop - unit.owned.start]
            if found == len(names) and not torch.isfinite(grad).all():
                found = number + slot.index
        number += len(unit.members.names)
    first = min(collectives.gather_scalars(group, float(found)))
    return names[int(first)] if first < len(names) else None
