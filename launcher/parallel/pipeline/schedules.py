"""Names of schedules -> the classes of torch.distributed.pipelining that run them. The arithmetic of each is in
`launcher.sharding.pipeline`."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from launcher.base.errors import ConfigError
from launcher.sharding.pipeline import PipelinePlan, virtual_problem

ScheduleClass = type[PipelineScheduleSingle] | type[PipelineScheduleMulti]

_CLASSES: dict[str, ScheduleClass] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zero_bubble_v": ScheduleZBVZeroBubble,
}


def schedule_class(plan: PipelinePlan) -> ScheduleClass:
    """Return the class that runs a schedule: one with `stage` as its first argument, or with a list of stages.

    For fewer micro-batches than ranks torch 2.8 refuses to run GPipe and 1F1B; interleaved 1F1B with one stage on each
    rank is 1F1B and takes them. Raises: ConfigError for numbers of stages or micro-batches that it cannot run.
    """
    problem = virtual_problem(plan.schedule, plan.num_virtual)
    if problem is not None:
        raise ConfigError(problem[0], where="pipeline.virtual_stages", hint=problem[1])
    problem = plan.problem()
    if problem is not None:
        raise ConfigError(problem[0], where="gradient_accumulation_steps", hint=problem[1])
    if plan.num_micro_batches < plan.num_ranks and plan.schedule == "1f1b":
        return ScheduleInterleaved1F1B
    return _CLASSES[plan.schedule]


def takes_stages(found: ScheduleClass) -> bool:
    """Whether a class takes a list of stages, `stages`, rather than one, `stage`."""
    return issubclass(found, PipelineScheduleMulti)


def build_schedule(plan: PipelinePlan, stages: list[Any], **arguments: Any) -> Any:
    """Return the schedule of torch over this rank's stages. arguments: of the class, such as `loss_fn`.

    Raises: ConfigError for numbers of micro-batches that this release of torch cannot run.
    """
    found: Any = schedule_class(plan)
    try:
        return found(stages if takes_stages(found) else stages[0], plan.num_micro_batches, **arguments)
    except ValueError as error:
        raise ConfigError(
            f"torch cannot run {plan.num_micro_batches} micro-batches with {plan.schedule}: {error}",
            where="gradient_accumulation_steps",
            hint=f"use {plan.num_ranks} or more, or a multiple of the number of ranks",
        ) from error
