"""The optimizer step over owned ranges: norm, clip, update, publish."""

from __future__ import annotations

import math

import torch

from launcher.comm import collectives
from launcher.comm.groups import DataParallelGroup
from launcher.optim.api import FlatOptimizer
from launcher.zero.gradients import UnitGradients
from launcher.zero.stages import ZeroPolicy
from launcher.zero.unit import FlatUnit

# Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does.
CLIP_EPSILON = 1e-6


def global_grad_norm(
    gradients: list[UnitGradients], policy: ZeroPolicy, group: DataParallelGroup
) -> tuple[float, list[list[bool]] | None]:
    """Return the 2-norm of all gradients, each element counted once; the same bits on every rank.

    Beside it: which parameters had a gradient on any rank, by unit and slot; None when all had one. Every rank must
    call it after the reductions have finished.
    """
    if not gradients:
        return 0.0, None
    # Norms of units in fp32 (a fp64 sum is 40 times slower on a CPU), their squares in fp64.
    norms = [own.norm if own.norm is not None else torch.linalg.vector_norm(own.owned_grad) for own in gradients]
    total = torch.stack(norms).double().square().sum().reshape(1)
    num_unused = sum(own.used.count(False) for own in gradients)
    both = torch.cat([total, torch.tensor([float(num_unused)], dtype=torch.float64, device=group.device)])
    summed, unused_anywhere = collectives.sum_scalars(group, both).tolist()
    norm = math.sqrt(summed if policy.stage.shards_optimizer else total.item())
    return norm, _used_anywhere(gradients, group) if unused_anywhere else None


def _used_anywhere(gradients: list[UnitGradients], group: DataParallelGroup) -> list[list[bool]]:
    flags = [float(used) for own in gradients for used in own.used]
    summed = collectives.sum_scalars(group, torch.tensor(flags, dtype=torch.float64, device=group.device)).tolist()
    found = iter(summed)
    return [[next(found) > 0 for _ in own.used] for own in gradients]


def step_units(units: list[FlatUnit], optimizer: FlatOptimizer, policy: ZeroPolicy, group: DataParallelGroup) -> float:
    """Take one optimizer step and return the gradient norm before clipping. Every rank must call it.

    When the norm is not finite nothing is updated: one bad micro-batch must not destroy the weights. Parameters that
    had no gradient on any rank are left out of the step, weight decay included, as torch does.
    """
    trained = [(unit, unit.grads) for unit in units if unit.grads is not None]
    gradients = [own for _, own in trained]
    norm, used = global_grad_norm(gradients, policy, group)
    if math.isfinite(norm):
        coefficient = policy.max_grad_norm / (norm + CLIP_EPSILON)
        if policy.max_grad_norm > 0 and coefficient < 1.0:
            torch._foreach_mul_([own.owned_grad for own in gradients], coefficient)
        optimizer.step(
            None
            if used is None
            else {unit.index: unit.unused_ranges(flags) for (unit, _), flags in zip(trained, used, strict=True)}
        )
        for unit, _ in trained:
            unit.params.publish_update()
            if not policy.overlap_comm:
                unit.params.wait()
    for own in gradients:
        own.discard()
    return norm


def first_bad_gradient(units: list[FlatUnit], group: DataParallelGroup) -> str | None:
    """Return the name of the first parameter whose summed gradient has an element that is not finite.

    Every rank must call it, after `step_units` has skipped a step: the gradients still stand where they were.
    """
    trained = [(unit, unit.grads) for unit in units if unit.grads is not None]
    names = [name for unit, _ in trained for name in unit.members.names]
    found, number = len(names), 0
    for unit, own in trained:
        for slot, shared in unit.layout.slots_in(unit.owned):
            grad = own.owned_grad[shared.start - unit.owned.start : shared.stop - unit.owned.start]
            if found == len(names) and not torch.isfinite(grad).all():
                found = number + slot.index
        number += len(unit.members.names)
    first = min(collectives.gather_scalars(group, float(found)))
    return names[int(first)] if first < len(names) else None
