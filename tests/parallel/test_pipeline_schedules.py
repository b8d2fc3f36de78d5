"""What ranks of a pipeline do, run on a clock, against the formulas of schedules."""

from __future__ import annotations

import itertools

import pytest

from launcher.base.errors import ConfigError
from launcher.parallel.pipeline.runtime import Action, Kind, evaluation_actions, training_actions
from launcher.sharding.pipeline import PipelinePlan, link_between, num_links

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
_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
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


@pytest.mark.parametrize("plan", [*PLANS, PipelinePlan(4, 1, "1f1b", 2)], ids=str)
def test_what_ranks_receive_before_their_first_backward_others_send_before_theirs(plan: PipelinePlan) -> None:
    """There all ranks may raise: no host may wait for a micro-batch that another one does not send any more."""
    sent, received = set(), set()
    for actions in _order(plan).values():
        for kind, stage, batch in itertools.takewhile(lambda each: each.kind not in _BACKWARDS, actions):
            if kind is Kind.SEND_FORWARD:
                sent.add((stage + 1, batch))
            elif kind is Kind.RECEIVE_FORWARD:
                received.add((stage, batch))
    assert received <= sent


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


# ---- transfers on a device: those of a process group are queued, and each waits for its peer ----

_SENT = {Kind.SEND_FORWARD: 1, Kind.SEND_BACKWARD: -1}
_RECEIVED = {Kind.RECEIVE_FORWARD: -1, Kind.RECEIVE_BACKWARD: 1}
_TRANSFER = 0.05


def _transfer_of(plan: PipelinePlan, action: Action) -> tuple[tuple[str, int, int], int] | None:
    """Return a name that both sides have for a transfer, and the peer; None for what is computed."""
    kind, stage, batch = action
    if kind in _SENT:
        other = stage + _SENT[kind]
        return ("forward" if kind is Kind.SEND_FORWARD else "backward", other, batch), plan.rank_of(other)
    if kind in _RECEIVED:
        return ("forward" if kind is Kind.RECEIVE_FORWARD else "backward", stage, batch), plan.rank_of(
            stage + _RECEIVED[kind]
        )
    return None


class _Queues:
    """The streams of all ranks: one for computing, and one for each group of transfers. Hosts wait for nothing."""

    def __init__(self, plan: PipelinePlan, order: dict[int, list[Action]], *, has_links: bool) -> None:
        self.plan = plan
        self.computing: dict[int, list[tuple[Action, list[tuple[str, int, int]]]]] = {rank: [] for rank in order}
        self.transfers: dict[tuple[int, int], list[tuple[tuple[str, int, int], int, int]]] = {}
        for rank, actions in order.items():
            for action in actions:
                found = _transfer_of(plan, action)
                if found is None:
                    self.computing[rank].append((action, _received_before(plan, rank, action)))
                    continue
                name, peer = found
                link = link_between(rank, peer, plan.num_ranks) if has_links else 0
                self.transfers.setdefault((rank, link), []).append((name, peer, len(self.computing[rank])))

    def run(self) -> float:
        """Return when the last rank has ended. A deadlock is an error."""
        ended: dict[tuple[str, int, int], float] = {}
        clock = dict.fromkeys(self.computing, 0.0)
        busy = dict.fromkeys(self.transfers, 0.0)
        done: dict[int, list[float]] = {rank: [0.0] for rank in self.computing}  # when so many actions had ended
        while any(self.computing.values()) or any(self.transfers.values()):
            has_moved = False
            for rank, actions in self.computing.items():
                while actions and all(name in ended for name in actions[0][1]):
                    action, needs = actions.pop(0)
                    clock[rank] = max([clock[rank], *(ended[name] for name in needs)]) + _DURATION[action.kind]
                    done[rank].append(clock[rank])
                    has_moved = True
            for (rank, link), queue in self.transfers.items():
                if not queue:
                    continue
                name, peer, after = queue[0]
                others = self.transfers[peer, link]
                if not others or others[0][0] != name:
                    continue
                sides = ((rank, after), (peer, others[0][2]))
                if any(len(done[side]) <= count for side, count in sides):
                    continue
                begin = max(busy[rank, link], busy[peer, link], *(done[side][count] for side, count in sides))
                ended[name] = busy[rank, link] = busy[peer, link] = begin + _TRANSFER
                queue.pop(0)
                others.pop(0)
                has_moved = True
            assert has_moved, "a deadlock"
        return max(clock.values())


def _received_before(plan: PipelinePlan, rank: int, action: Action) -> list[tuple[str, int, int]]:
    """Name what must have arrived before an action."""
    kind, stage, batch = action
    if kind is Kind.FORWARD:
        return [("forward", stage, batch)] if stage and plan.rank_of(stage - 1) != rank else []
    is_last = stage == plan.num_stages - 1
    if kind is Kind.BACKWARD_WEIGHT or is_last or plan.rank_of(stage + 1) == rank:
        return []
    return [("backward", stage, batch)]


ODD = [PipelinePlan(p, v, name, 2 * p) for p in (3, 5) for name, v in (("1f1b", 1), ("interleaved_1f1b", 2))]


@pytest.mark.parametrize("plan", [*PLANS, *ODD], ids=str)
def test_queued_transfers_never_block_each_other_for_ever(plan: PipelinePlan) -> None:
    for actions in (training_actions, evaluation_actions):
        order = {rank: actions(plan, rank) for rank in range(plan.num_ranks)}
        assert _Queues(plan, order, has_links=True).run() <= _Queues(plan, order, has_links=False).run() + 1e-9


def test_pairs_of_ranks_with_groups_of_their_own_keep_what_virtual_stages_gain() -> None:
    plan, plain = PipelinePlan(8, 2, "interleaved_1f1b", 16), PipelinePlan(8, 1, "1f1b", 16)
    order = _order(plan)
    queued, linked = (_Queues(plan, order, has_links=each).run() for each in (False, True))
    assert linked < 0.75 * queued
    # A stage of `plain` has the work of two.
    assert linked < 2 * _Queues(plain, _order(plain), has_links=True).run() < queued


@pytest.mark.parametrize("num_ranks", range(2, 10))
def test_neighbouring_pairs_have_different_links(num_ranks: int) -> None:
    pairs = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks)]
    links = [link_between(*pair, num_ranks) for pair in pairs]
    assert links == [link_between(*reversed(pair), num_ranks) for pair in pairs]
    assert set(links) == set(range(num_links(num_ranks)))
    if num_ranks > 2:
        assert all(links[i] != links[i - 1] for i in range(num_ranks))
