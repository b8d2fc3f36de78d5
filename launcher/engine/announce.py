"""What is said when an engine starts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

from launcher.base import env
from launcher.base.errors import Diagnostic
from launcher.base.log import get_logger
from launcher.comm.accelerator import accelerator_type
from launcher.config.auto import AutoChoice
from launcher.engine.dump import state_text
from launcher.engine.engine import EngineParts
from launcher.engine.policy import precision_notice
from launcher.kernels.select import describe_kernel
from launcher.optim.api import UnitOptimizer
from launcher.optim.factory import OptimizerPlan
from launcher.zero.placement import Disks


def announce_disks(disks: Disks) -> None:
    """Say what is on the disks of this host. For the first rank of each host: every host has its own disks."""
    if int(os.environ.get(env.LOCAL_RANK.name, "0")) == 0:
        for notice in disks.notices:
            get_logger().info("disk: %s", notice)


def announce(
    parts: EngineParts,
    notices: Sequence[Diagnostic],
    choices: Sequence[AutoChoice],
    plan: OptimizerPlan | None,
    split_notices: Sequence[str],
) -> None:
    """Say in a few lines what this run will do.

    notices: of the config; choices: what "auto" became; split_notices: of how the model was split over ranks.
    """
    log = get_logger()
    policy, batch, optimizer = parts.policy, parts.batch, parts.sharded.optimizer
    log.info(
        "zero stage %s · %s · %s · %s · micro %d × accumulation %d × dp %d = batch %d",
        int(parts.settings.zero_optimization.stage),
        policy.precision.label,
        "no optimizer: inference only" if optimizer is None else optimizer.flat.label,
        f"clip {policy.max_grad_norm:g}" if policy.max_grad_norm else "no clipping",
        batch.micro_batch_size,
        batch.accumulation_steps,
        batch.world_size,
        batch.train_batch_size,
    )
    if plan is not None and (plan.kind is not None or plan.why_torch is not None):
        log.info("optimizer kernel: %s", _kernel_text(plan, parts))
    if parts.mesh.label is not None:
        log.info("mesh: %s", parts.mesh.label)
    for text in split_notices:
        log.info("%s", text)
    if parts.group.device.type == "cpu" and accelerator_type() is not None:
        log.warning(
            "the process group is gloo's, which sends no GPU memory: this engine trains on the CPU, and the GPUs stay"
            " idle (start the group with nccl, or leave it to the engine)"
        )
    if policy.offload.is_any:
        log.info("offload: %s", policy.offload.label)
    for reason, together in itertools.groupby(sorted(choices, key=lambda c: c.reason), key=lambda c: c.reason):
        log.info("auto: %s (%s)", " · ".join(f"{choice.key} = {choice.value}" for choice in together), reason)
    for notice in notices:
        log.info("note: %s", notice)
    precision = precision_notice(parts.settings)
    if precision is not None:
        log.info("note: %s", precision)
    if plan is not None and plan.summary is not None:
        log.info("%s", plan.summary)
    if plan is not None and plan.notice is not None:
        log.warning("%s", plan.notice)
    if parts.settings.dump_state:
        log.info("%s", state_text(parts.settings, batch, policy, parts.sharded.units))


def _kernel_text(plan: OptimizerPlan, parts: EngineParts) -> str:
    """Say what updates the shards, and why it is that."""
    device_type, optimizer = parts.group.device.type, parts.sharded.optimizer
    if plan.why_torch is not None:
        return f"torch's own ({plan.why_torch})"
    kernel = describe_kernel(device_type)
    is_torch = optimizer is not None and not isinstance(optimizer.flat, UnitOptimizer)
    return f"torch's own, in place of {kernel}" if is_torch and not kernel.startswith("torch") else kernel
