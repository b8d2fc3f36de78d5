"""What each rank of a pipeline does in one step, in order: computing, sending and receiving.

The orders of interleaved and zero-bubble schedules, and the places of the transfers in every order, are computed by
`torch.distributed.pipelining`. All transfers stand in one order of the whole pipeline, of which each rank has its own
part. So a rank may wait wherever it is: what it waits for comes earlier in that order.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from launcher.base.errors import ConfigError
from launcher.sharding.pipeline import PipelinePlan


class Kind(Enum):
    """What an action does. The values are torch's."""

    FORWARD = "F"
    BACKWARD = "B"  # of the inputs and of the parameters
    BACKWARD_INPUT = "I"  # of the inputs alone: the stage before waits for it
    BACKWARD_WEIGHT = "W"  # the gradients of the parameters, later
    SEND_FORWARD = "SEND_F"
    RECEIVE_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECEIVE_BACKWARD = "RECV_B"


class Action(NamedTuple):
    """One action of one rank."""

    kind: Kind
    stage: int
    micro_batch: int


@dataclass
class _TorchStage:
    """What torch's schedules ask of a stage to compute their order."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    has_backward: bool = True
    submod: nn.Module = field(default_factory=nn.Identity)
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)


_Order = dict[int, list[Any]]  # by rank, what it computes: torch's actions
_TORCH_SCHEDULES = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "zero_bubble_v": "ScheduleZBVZeroBubble",
}


@functools.cache
def _torch_schedules() -> Any:
    """Import torch's schedules, for runs with a pipeline alone: they take 1.8 s of a processor, and 150 MiB."""
    return importlib.import_module("torch.distributed.pipelining.schedules")


def training_actions(plan: PipelinePlan, rank: int) -> list[Action]:
    """Return what a rank of the pipeline does in one step. Raises: ConfigError for micro-batches that do not fit."""
    problem = plan.problem()
    if problem is not None:
        raise ConfigError(problem[0], where="gradient_accumulation_steps", hint=problem[1])
    if plan.schedule in _TORCH_SCHEDULES:
        return _with_transfers(_torch_order(plan), plan, rank)
    order: _Order = {}
    for each in range(plan.num_ranks):
        # Forwards before the first backward: all of them, or as many as there are stages behind this one.
        num_ahead = plan.num_micro_batches if plan.schedule == "gpipe" else plan.num_ranks - 1 - each
        order[each] = _one_stage_order(each, min(num_ahead, plan.num_micro_batches), plan.num_micro_batches)
    return _with_transfers(order, plan, rank)


def evaluation_actions(plan: PipelinePlan, rank: int) -> list[Action]:
    """Return what a rank does in an evaluation: forwards alone.

    Micro-batches pass in rounds of as many as there are ranks, so that no rank waits for its own next stage.
    """
    order = {
        each: [
            _of_torch(Kind.FORWARD, stage, micro_batch)
            for first in range(0, plan.num_micro_batches, plan.num_ranks)
            for stage in plan.stages_of(each)
            for micro_batch in range(first, min(first + plan.num_ranks, plan.num_micro_batches))
        ]
        for each in range(plan.num_ranks)
    }
    return _with_transfers(order, plan, rank)


def _one_stage_order(stage: int, num_ahead: int, num_micro_batches: int) -> list[Any]:
    """Return `num_ahead` forwards, then one forward and one backward in turns, then what is left of the backwards."""
    forwards = [_of_torch(Kind.FORWARD, stage, each) for each in range(num_micro_batches)]
    backwards = [_of_torch(Kind.BACKWARD, stage, each) for each in range(num_micro_batches)]
    in_turns = zip(forwards[num_ahead:], backwards, strict=False)
    return [*forwards[:num_ahead], *chain.from_iterable(in_turns), *backwards[num_micro_batches - num_ahead :]]


def _torch_order(plan: PipelinePlan) -> _Order:
    stages = [_TorchStage(stage, plan.num_stages, plan.num_ranks) for stage in plan.stages_of(0)]
    try:
        schedule = getattr(_torch_schedules(), _TORCH_SCHEDULES[plan.schedule])(
            stages, plan.num_micro_batches, loss_fn=_no_loss
        )
    except ValueError as error:
        raise ConfigError(
            f"torch cannot order {plan.num_micro_batches} micro-batches in {plan.schedule}: {error}",
            where="gradient_accumulation_steps",
            hint=f"use {plan.num_ranks} or more, or a multiple of the number of ranks",
        ) from error
    order: _Order = schedule.pipeline_order
    return order


def _no_loss(*_: Any) -> None:
    """Tell torch's schedules that there is a backward."""


def _with_transfers(order: _Order, plan: PipelinePlan, rank: int) -> list[Action]:
    # None stands for a wait. An input's gradient is sent before those of the weights, also where these come next.
    computing = {each: [action for action in actions if action is not None] for each, actions in order.items()}
    lowered = _torch_schedules()._add_send_recv(computing, plan.rank_of, plan.num_stages)
    own: list[Any] = lowered[rank]
    return [Action(_kind_of(each.computation_type), each.stage_index, each.microbatch_index) for each in own]


def _of_torch(kind: Kind, stage: int, micro_batch: int) -> Any:
    torch_schedules = _torch_schedules()
    return torch_schedules._Action(stage, torch_schedules._ComputationType.from_str(kind.value), micro_batch)


def _kind_of(computation_type: Any) -> Kind:
    return next(kind for kind in Kind if _torch_schedules()._ComputationType.from_str(kind.value) is computation_type)
