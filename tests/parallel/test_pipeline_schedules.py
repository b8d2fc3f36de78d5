"""What ranks of a pipeline do, run on a clock, against the formulas of schedules."""

from __future__ import annotations

import pytest

from launcher.base.errors import ConfigError
from launcher.parallel.pipeline.actions import Action, Kind, evaluation_actions, training_actions
from launcher.sharding.pipeline import PipelinePlan

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
_DURATION = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}


def _order(plan: PipelinePlan) -> dict[int, list[Action]]:
    """What each rank does."""
    return {rank: training_actions(plan, rank) for rank in range(plan.num_ranks)}


def _run(plan: PipelinePlan, order: dict[int, list[Action]]) -> tuple[float, list[int]]:
    """Run an order with a forward of 1 and a backward of 2. Returns the idle part of the step, and the forwards that
    each rank keeps at most."""
    ready: dict[tuple[str, int, int], int] = {}
    todo = {rank: [action for action in order[rank] if action.kind in _DURATION] for rank in order}
    clock, busy, kept = [dict.fromkeys(todo, 0) for _ in range(3)]
    most = dict(kept)
    while any(todo.values()):
        before = sum(map(len, todo.values()))
        for rank, actions in todo.items():
            while actions and all(need in ready for need in _needs(plan, actions[0])):
                needs = [ready[need] for need in _needs(plan, actions[0])]
                kind, stage, batch = actions.pop(0)
                assert stage in plan.stages_of(rank)
                clock[rank] = max([clock[rank], *needs]) + _DURATION[kind]
                busy[rank] += _DURATION[kind]
                ready.setdefault(("forward" if kind is Kind.FORWARD else "gradient", stage, batch), clock[rank])
                kept[rank] += {Kind.FORWARD: 1, Kind.BACKWARD_INPUT: 0}.get(kind, -1)
                most[rank] = max(most[rank], kept[rank])
        assert sum(map(len, todo.values())) < before, "a deadlock"
    return 1 - min(busy.values()) / max(clock.values()), list(most.values())


def _needs(plan: PipelinePlan, action: Action) -> list[tuple[str, int, int]]:
    """What must have been computed before."""
    kind, stage, batch = action
    if kind is Kind.FORWARD:
        return [("forward", stage - 1, batch)] if stage else []
    if kind is Kind.BACKWARD_WEIGHT:
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


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_transfers_of_two_ranks_have_one_order_on_both(plan: PipelinePlan) -> None:
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}
    received: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for rank, actions in _order(plan).items():
        for kind, stage, batch in actions:
            if kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
                to = stage + (1 if kind is Kind.SEND_FORWARD else -1)
                sent.setdefault((rank, plan.rank_of(to)), []).append((to, batch))
            elif kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD):
                source = stage - (1 if kind is Kind.RECEIVE_FORWARD else -1)
                received.setdefault((plan.rank_of(source), rank), []).append((stage, batch))
    assert sent == received


def test_evaluation_runs_every_forward_once() -> None:
    for plan in PLANS:
        found = [action for rank in range(plan.num_ranks) for action in evaluation_actions(plan, rank)]
        forwards = [(stage, batch) for kind, stage, batch in found if kind is Kind.FORWARD]
        assert sorted(forwards) == [(s, m) for s in range(plan.num_stages) for m in range(plan.num_micro_batches)]


def test_numbers_that_a_schedule_cannot_run_are_refused() -> None:
    with pytest.raises(ConfigError, match="in 2 equal rounds, and 2 does not divide 9") as caught:
        training_actions(PipelinePlan(4, 2, "interleaved_1f1b", 9), 0)
    assert "use 8 or 10 micro-batches" in str(caught.value)


def test_1f1b_runs_fewer_micro_batches_than_ranks() -> None:
    plan = PipelinePlan(4, 1, "1f1b", 2)
    idle, _ = _run(plan, _order(plan))
    assert idle == pytest.approx(plan.idle_fraction)
