"""The axes of a mesh, and parameters in parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.sharding.layout import TensorSplit
from launcher.sharding.mesh import AXES, MeshSizes

SIZES = st.builds(MeshSizes, *[st.integers(1, 4)] * 4)


@given(SIZES)
def test_every_rank_is_once_in_a_group_along_each_axis(sizes: MeshSizes) -> None:
    for position, axis in enumerate(AXES):
        groups = sizes.ranks_along(axis)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(sizes.world_size))
        for ranks in groups:
            places = [sizes.coordinates(rank) for rank in ranks]
            assert [place[position] for place in places] == list(range(sizes.shape[position]))
            assert len({place[:position] + place[position + 1 :] for place in places}) == 1


@given(SIZES)
def test_ranks_of_one_copy_of_the_model_have_the_same_samples(sizes: MeshSizes) -> None:
    groups = sizes.ranks_along("pipeline", "tensor")
    assert {len(ranks) for ranks in groups} == {sizes.num_model_parts}
    assert len(groups) == sizes.num_replicas
    data = AXES.index("data")
    assert all(len({sizes.coordinates(rank)[data] for rank in ranks}) == 1 for ranks in groups)


def test_the_tensor_axis_is_the_innermost_and_the_equation_names_the_axes() -> None:
    sizes = MeshSizes(2, pipeline=2, tensor=2)
    assert sizes.ranks_along("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sizes.ranks_along("pipeline") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert sizes.equation == "2 (pipeline) × 2 (data) × 2 (tensor) = 8"
    assert MeshSizes(64, tensor=8).text() == (
        "64 (data) × 8 (tensor) = 512 ranks"
        "; data 0-504 by 8 | 1-505 by 8 | 2-506 by 8 | 3-507 by 8 and 4 more"
        "; tensor 0-7 | 8-15 | 16-23 | 24-31 and 60 more"
    )


def test_neighbours_along_the_data_axis_have_one_set_of_experts_together() -> None:
    sizes = MeshSizes(6, expert=2)
    assert sizes.ranks_of_experts() == [[0, 1], [2, 3], [4, 5]]
    assert sizes.ranks_of_replicas() == [[0, 2, 4], [1, 3, 5]]
    assert sizes.text() == "6 (data, experts over 2) = 6 ranks; data 0-5; expert 0,1 | 2,3 | 4,5"
    assert MeshSizes(4, tensor=2, expert=2).ranks_of_experts() == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert MeshSizes(4, tensor=2, expert=2).ranks_of_replicas() == [[0, 4], [2, 6], [1, 5], [3, 7]]


def test_several_hosts_are_named_with_the_axes_that_leave_them() -> None:
    sizes = MeshSizes(2, pipeline=2, tensor=2)
    text = sizes.text(["node-a"] * 4 + ["node-b"] * 4)
    assert text == (
        "2 (pipeline) × 2 (data) × 2 (tensor) = 8 ranks; pipeline 0,4 | 1,5 | 2,6 | 3,7 (over 2 hosts)"
        "; data 0,2 | 1,3 | 4,6 | 5,7 (each on one host); tensor 0,1 | 2,3 | 4,5 | 6,7 (each on one host)"
        "; hosts node-a 0,1,2,3 | node-b 4,5,6,7"
    )
    assert sizes.text(["node-a"] * 8) == sizes.text()


@pytest.mark.parametrize("blocks", [(8,), (4, 2, 2)])
def test_parts_of_a_parameter_have_their_share_of_every_block(blocks: tuple[int, ...]) -> None:
    splits = [TensorSplit((3, 8), 1, index, 2, blocks) for index in range(2)]
    taken = sorted(place for split in splits for start, stop in split.pieces() for place in range(start, stop))
    assert taken == list(range(8))
    assert {split.local_shape for split in splits} == {(3, 4)}
    assert splits[0].is_known
    assert splits[1].pieces() == [(start + block // 2, start + block) for start, block in _starts(blocks)]


def _starts(blocks: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(sum(blocks[:index]), block) for index, block in enumerate(blocks)]


@pytest.mark.parametrize(
    "split",
    [
        TensorSplit((3, 8), 2, 0, 2, (8,)),
        TensorSplit((3, 8), 1, 2, 2, (8,)),
        TensorSplit((3, 8), 1, 0, 3, (8,)),
        TensorSplit((3, 8), 1, 0, 2, (4,)),
        TensorSplit((3, 8), 1, 0, 0, (8,)),
        TensorSplit((3, -8), 1, 0, 2, (-8,)),
    ],
)
def test_a_part_that_no_rank_could_have_is_known(split: TensorSplit) -> None:
    assert not split.is_known
