"""What an engine leaves for the launcher, which reads it when memory has ended: a rank that is killed says nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from typing import Any

from torch import nn

from launcher.activation.blocks import finds_blocks, recomputes
from launcher.base import env
from launcher.base.errors import LauncherError
from launcher.base.private_files import write_private
from launcher.comm.mesh import ParallelMesh
from launcher.config.check import check
from launcher.config.equations import BatchPlan
from launcher.config.load import patched
from launcher.config.policies import zero_policy
from launcher.config.schema import Config
from launcher.engine.optimizer_plan import check_offload
from launcher.optim.factory import OptimizerPlan
from launcher.planner.ladder import INFERENCE_STANDINGS, STANDINGS, EngineFacts, Standing, standing_keys
from launcher.planner.settings import at
from launcher.sharding.layout import unsharded_numel


@dataclasses.dataclass
class _Left:
    """What this process has left."""

    facts: EngineFacts | None = None  # of the engine that was built last, of those that train
    num_trained: int = 0  # engines that train
    is_followed: bool = False  # what makes batches here goes by the micro-batch of the config


_left = _Left()


def facts_of(
    model: nn.Module,
    settings: Config,
    batch: BatchPlan,
    mesh: ParallelMesh,
    *,
    trains: bool,
    has_loader: bool,
    has_pipeline: bool,
) -> EngineFacts:
    """Return where an engine stands. settings: resolved. model: before it is divided.

    trains: it has an optimizer. has_loader: it reads its data itself, in micro-batches of the config.
    """
    zero = settings.zero_optimization
    is_counted = settings.managed_gradient_accumulation and settings.elasticity.enabled is not True
    return EngineFacts(
        device=mesh.world.device.type,
        stage=int(zero.stage),
        optimizer=zero.offload_optimizer.device if trains else "none",
        param=zero.offload_param.device if int(zero.stage) == 3 else "none",
        num_shards=mesh.shard.world_size,
        micro_batch=batch.micro_batch_size,
        accumulation=batch.accumulation_steps,
        follows_micro_batch=is_counted and (has_loader or _left.is_followed),
        recomputes=settings.activation_checkpointing.blocks or recomputes(model),
        can_recompute=not has_pipeline and finds_blocks(model),
        trains=trains,
        has_pipeline=has_pipeline,
        nvme_path=zero.offload_optimizer.nvme_path or zero.offload_param.nvme_path,
        num_params=None if has_pipeline else sum(map(unsharded_numel, model.parameters())),
        precision=zero_policy(settings, mesh.sizes.num_replicas).precision.param.value,
        optimizer_type=None if settings.optimizer is None else settings.optimizer.type,
    )


def leave_facts(facts: EngineFacts) -> None:
    """Leave where an engine stands, before anything of it takes memory. A rank of `launch` only; any rank calls it."""
    if not facts.trains and _left.num_trained:
        return  # beside one that trains it is a small part
    if _left.num_trained and facts.trains:
        facts = dataclasses.replace(facts, follows_micro_batch=False)  # a patch would give all of them the same
    _left.num_trained += facts.trains
    _leave(facts)


def left_facts() -> EngineFacts | None:
    """Return where the engine of this process stands, None before there is one."""
    return _left.facts


def leave_refused(
    raw: dict[str, Any], settings: Config, mesh: ParallelMesh, plan: OptimizerPlan | None, *, trains: bool
) -> None:
    """Leave which standings of the ladder its config or its optimizer rules out, too. raw: the config as given."""
    if _left.facts is None:
        return
    standings = STANDINGS if trains else INFERENCE_STANDINGS
    refused = tuple(one.text for one in standings if _is_refused(one, raw, settings, mesh, plan))
    _leave(dataclasses.replace(_left.facts, refused=refused))


def _is_refused(
    standing: Standing, raw: dict[str, Any], settings: Config, mesh: ParallelMesh, plan: OptimizerPlan | None
) -> bool:
    if check(patched(raw, standing_keys(standing)), mesh.world.world_size).errors:
        return True
    try:
        moved = at(settings, *standing)
        check_offload(plan, zero_policy(moved, mesh.sizes.num_replicas), moved)
    except LauncherError:
        return True
    return False


def follow_micro_batch() -> None:
    """Note that what makes batches in this process goes by the micro-batch of the config: a smaller one takes effect.

    Called when a script asks an engine for it, and when the Trainer's arguments were changed to be it.
    """
    if _left.is_followed:
        return
    _left.is_followed = True
    if _left.facts is not None and _left.num_trained == 1:
        _leave(dataclasses.replace(_left.facts, follows_micro_batch=True))


def _leave(facts: EngineFacts) -> None:
    _left.facts = facts
    path = os.environ.get(env.ENGINE_FILE.name)
    if path is not None:
        with contextlib.suppress(OSError):  # the launcher can suggest no setting then; training does not depend on it
            write_private(path, json.dumps(dataclasses.asdict(facts)).encode())
