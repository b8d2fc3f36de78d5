"""Ranks that were rehearsed, beside each other: roles, traffic, and where two of them would part."""

from __future__ import annotations

import json

from launcher.planner.rehearsal import (
    Call,
    Group,
    RankRehearsal,
    first_differences,
    ranks_of_earlier_stages,
    roles,
    sent_bytes,
    sizes_of,
)
from launcher.sharding.mesh import MeshSizes

WORLD = Group("all ranks", (0, 1, 2, 3))
PAIR = Group("pipeline", (0, 2))


def call(kind: str = "all_gather", group: int = 0, num_bytes: int = 64, peer: int | None = None) -> Call:
    return Call(kind, group, num_bytes, "the gather of weight", "forward", 1, peer, True)


def rehearsed(rank: int, calls: list[Call], *groups: Group, **facts: object) -> RankRehearsal:
    return RankRehearsal(rank, 4, 2, groups=list(groups) or [WORLD], calls=calls, num_steps=1, **facts)  # type: ignore[arg-type]


def test_json_holds_everything() -> None:
    found = rehearsed(1, [call(), call("send", peer=3)], WORLD, peaks={"forward": {"parameters": 8}}, error="why")
    assert RankRehearsal.from_json(json.dumps(found.as_json())) == found


def test_the_peak_is_that_of_a_step_on_the_device() -> None:
    peaks = {"initialize": {"model": 900}, "forward": {"parameters": 5, "host": 70}, "step": {"optimizer": 7}}
    assert rehearsed(0, [], peaks=peaks).peak_bytes == 7
    assert rehearsed(0, []).peak_bytes == 0


def test_a_rank_of_each_role() -> None:
    assert roles(MeshSizes(1)) == [0]
    assert roles(MeshSizes(8)) == [0, 7]
    assert roles(MeshSizes(2, pipeline=3)) == [0, 2, 4, 5]
    assert roles(MeshSizes(8, expert=4)) == [0, 1, 2, 3, 7]
    assert roles(MeshSizes(2, tensor=2)) == [0, 3]
    assert roles(MeshSizes(2, tensor=2, sequence=2), all_of_them=True) == [0, 1, 2, 3, 7]
    assert sizes_of(rehearsed(0, [])) == MeshSizes(4)
    assert ranks_of_earlier_stages(MeshSizes(2, pipeline=3), 5) == [0, 2]
    assert ranks_of_earlier_stages(MeshSizes(2, pipeline=3), 1) == []


def test_ranks_that_agree_differ_nowhere() -> None:
    ranks = [rehearsed(rank, [call(), call("all_reduce")]) for rank in (0, 1, 3)]
    assert first_differences(ranks) == []


def test_the_first_difference_of_each_group_is_told_with_both_sides() -> None:
    one = rehearsed(0, [call(), call("all_reduce"), call(group=1)], WORLD, PAIR)
    other = rehearsed(2, [call(), call("all_gather"), call(group=1)], WORLD, PAIR)
    (difference,) = first_differences([one, other])
    assert (difference.group, difference.position, difference.ranks) == (WORLD, 2, (0, 2))
    assert str(difference) == (
        'collective 2 of "all ranks" (4 ranks, 0 to 3): rank 0 begins all_reduce of 64 bytes (the gather of weight),'
        " rank 2 begins all_gather of 64 bytes (the gather of weight)"
    )


def test_a_rank_that_begins_fewer_is_waited_for() -> None:
    (difference,) = first_differences([rehearsed(0, [call(), call()]), rehearsed(3, [call()])])
    assert (difference.position, difference.calls[1]) == (2, None)
    assert str(difference).endswith("rank 3 begins none")


def test_other_sizes_and_other_steps_are_other_collectives() -> None:
    assert first_differences([rehearsed(0, [call()]), rehearsed(1, [call(num_bytes=32)])])
    assert first_differences([rehearsed(0, [call()]), rehearsed(1, [call()._replace(step=2)])])


def test_groups_alike_in_ranks_and_purpose_are_told_apart_by_their_order() -> None:
    one = rehearsed(0, [call(group=1)], WORLD, WORLD)
    assert first_differences([one, rehearsed(1, [call(group=1)], WORLD, WORLD)]) == []
    assert first_differences([one, rehearsed(1, [call(group=0)], WORLD, WORLD)])


def test_what_one_rank_sends_the_other_receives() -> None:
    sender = rehearsed(0, [call("send", 0, 16, peer=2)], PAIR)
    assert first_differences([sender, rehearsed(2, [call("receive", 0, 16, peer=0)], PAIR)]) == []
    (difference,) = first_differences([sender, rehearsed(2, [], PAIR)])
    assert difference.ranks == (0, 2)
    assert difference.calls[1] is None


def test_bytes_by_link() -> None:
    near, far = Group("tensor", (0, 1)), WORLD
    found = rehearsed(0, [call("all_reduce", 0, 80), call("all_gather", 1, 80), call("send", 1, 5, peer=3)], near, far)
    assert found.traffic() == {"within a node": 80, "between nodes": 60 + 5}
    assert sent_bytes(call("reduce_scatter", num_bytes=80), 4) == 60
    assert sent_bytes(call("receive", peer=1), 2) == sent_bytes(call("barrier"), 4) == 0
