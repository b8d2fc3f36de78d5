"""Formulas of schedules against the orders of torch's classes, run on a clock."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, _Action, _ComputationType

from launcher.base.errors import ConfigError
from launcher.parallel.pipeline.schedules import build_schedule, schedule_class, takes_stages
from launcher.sharding.pipeline import SCHEDULES, PipelinePlan

PLANS = [
    PipelinePlan(p, v, schedule, m)
    for schedule, v in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 3),
        ("zero_bubble", 1),
        ("zero_bubble", 2),
        ("zero_bubble_v", 2),
    )
    for p, m in ((2, 4), (4, 8), (4, 12), (4, 10))
]
_KINDS = {
    _ComputationType.FORWARD: "forward",
    _ComputationType.FULL_BACKWARD: "backward",
    _ComputationType.BACKWARD_INPUT: "of inputs",
    _ComputationType.BACKWARD_WEIGHT: "of weights",
}
_DURATION = {"forward": 1, "backward": 2, "of inputs": 1, "of weights": 1}


def _stage(plan: PipelinePlan, index: int) -> Any:
    """What torch's schedules ask of a stage while they are built."""
    return SimpleNamespace(
        group_size=plan.num_ranks,
        group_rank=plan.rank_of(index),
        num_stages=plan.num_stages,
        stage_index=index,
        is_first=index == 0,
        is_last=index == plan.num_stages - 1,
        submod=torch.nn.Identity(),
    )


def _order(plan: PipelinePlan) -> dict[int, list[Any]]:
    """The order of torch's class; of 1F1B what its step does, as the order that it shows leaves out a micro-batch."""
    schedule = build_schedule(plan, [_stage(plan, index) for index in plan.stages_of(0)], loss_fn=lambda *_: None)
    if plan.schedule != "1f1b":
        return dict(schedule.pipeline_order)
    return {rank: _one_forward_one_backward(plan, rank) for rank in range(plan.num_ranks)}


def _one_forward_one_backward(plan: PipelinePlan, rank: int) -> list[Any]:
    forwards = [_Action(rank, _ComputationType.FORWARD, batch) for batch in range(plan.num_micro_batches)]
    backwards = [_Action(rank, _ComputationType.FULL_BACKWARD, batch) for batch in range(plan.num_micro_batches)]
    num_first = min(plan.num_micro_batches, plan.num_ranks - rank)
    rest = itertools.zip_longest(backwards, forwards[num_first:])
    return [*forwards[:num_first], *itertools.chain.from_iterable(rest)]


def _run(plan: PipelinePlan, order: dict[int, list[Any]]) -> tuple[float, list[int]]:
    """Run an order with a forward of 1 and a backward of 2. Returns the idle part of the step, and the forwards that
    each rank keeps at most."""
    ready: dict[tuple[str, int, int], int] = {}
    todo = {rank: [action for action in order[rank] if action and action.computation_type in _KINDS] for rank in order}
    clock, busy, kept = [dict.fromkeys(todo, 0) for _ in range(3)]
    most = dict(kept)
    while any(todo.values()):
        before = sum(map(len, todo.values()))
        for rank, actions in todo.items():
            while actions and all(need in ready for need in _needs(plan, actions[0])):
                needs = [ready[need] for need in _needs(plan, actions[0])]
                kind, stage, batch = _KINDS[actions[0].computation_type], actions[0].stage_index, actions[0][2]
                actions.pop(0)
                assert stage in plan.stages_of(rank)
                clock[rank] = max([clock[rank], *needs]) + _DURATION[kind]
                busy[rank] += _DURATION[kind]
                ready.setdefault(("forward" if kind == "forward" else "gradient", stage, batch), clock[rank])
                kept[rank] += {"forward": 1, "of inputs": 0}.get(kind, -1)
                most[rank] = max(most[rank], kept[rank])
        assert sum(map(len, todo.values())) < before, "a deadlock"
    return 1 - min(busy.values()) / max(clock.values()), list(most.values())


def _needs(plan: PipelinePlan, action: Any) -> list[tuple[str, int, int]]:
    """What must have been computed before."""
    kind, stage, batch = _KINDS[action.computation_type], action.stage_index, action[2]
    if kind == "forward":
        return [("forward", stage - 1, batch)] if stage else []
    if kind == "of weights":
        return [("gradient", stage, batch)]
    return [("forward", stage, batch), *([("gradient", stage + 1, batch)] if stage < plan.num_stages - 1 else [])]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_torch_s_order_is_idle_and_keeps_as_much_as_the_formulas_say(plan: PipelinePlan) -> None:
    idle, kept = _run(plan, _order(plan))
    assert idle == pytest.approx(plan.idle_fraction)
    assert kept == [plan.in_flight(rank) for rank in range(plan.num_ranks)]


@pytest.mark.parametrize("plan", PLANS[::4], ids=str)
def test_every_stage_is_on_one_rank(plan: PipelinePlan) -> None:
    found = {stage: rank for rank in range(plan.num_ranks) for stage in plan.stages_of(rank)}
    assert found == {stage: plan.rank_of(stage) for stage in range(plan.num_stages)}
    assert all(plan.stages_of(rank) == tuple(sorted(plan.stages_of(rank))) for rank in range(plan.num_ranks))


def test_each_schedule_has_a_class() -> None:
    for name, row in SCHEDULES.items():
        found = schedule_class(PipelinePlan(2, row.min_virtual, name, 4))
        assert takes_stages(found) == issubclass(found, PipelineScheduleMulti) == (name not in ("gpipe", "1f1b"))


def test_numbers_that_a_schedule_cannot_run_are_refused() -> None:
    with pytest.raises(ConfigError, match="zero_bubble_v has 2 stages on each rank, not 1"):
        schedule_class(PipelinePlan(2, 1, "zero_bubble_v", 4))
    with pytest.raises(ConfigError, match="in 2 equal rounds, and 2 does not divide 9") as caught:
        schedule_class(PipelinePlan(4, 2, "interleaved_1f1b", 9))
    assert "use 8 or 10 micro-batches" in str(caught.value)


def test_1f1b_runs_fewer_micro_batches_than_ranks() -> None:
    plan = PipelinePlan(4, 1, "1f1b", 2)
    schedule = build_schedule(plan, [_stage(plan, 0)], loss_fn=lambda *_: None)
    idle, _ = _run(plan, dict(schedule.pipeline_order))
    assert idle == pytest.approx(plan.idle_fraction)
