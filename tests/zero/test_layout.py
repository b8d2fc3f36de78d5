"""The arithmetic of units and shards: every element has one place, one group and one owner."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.zero.layout import (
    CHUNK_ALIGNMENT_NUMEL,
    join_small,
    layout_unit,
    split_by_size,
)

PARAMS = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 2)), min_size=1, max_size=12)


@given(PARAMS, st.integers(1, 9))
def test_every_element_has_one_owner_and_its_own_group(params: list[tuple[int, int]], world_size: int) -> None:
    layout = layout_unit([numel for numel, _ in params], [group for _, group in params], world_size)
    expected = [group for numel, group in params for _ in range(numel)]
    found: list[int | None] = [None] * layout.padded_numel
    for rank in range(world_size):
        owned = layout.chunk_range(rank)
        for slot in layout.slots:
            for element in slot.within(owned):
                assert slot.offset + element in owned
                assert found[slot.offset + element] is None
                found[slot.offset + element] = slot.group
    assert found[: len(expected)] == expected
    assert set(found[len(expected) :]) <= {None}  # padding is nobody's


@given(PARAMS, st.integers(1, 9))
def test_chunks_are_equal_aligned_and_hardly_padded(params: list[tuple[int, int]], world_size: int) -> None:
    layout = layout_unit([numel for numel, _ in params], [group for _, group in params], world_size)
    total = sum(numel for numel, _ in params)
    assert layout.chunk_numel * world_size == layout.padded_numel
    assert layout.chunk_numel % CHUNK_ALIGNMENT_NUMEL == 0
    assert 0 <= layout.padded_numel - total < world_size * CHUNK_ALIGNMENT_NUMEL


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 150))
def test_runs_cover_all_parameters_in_order_and_keep_the_bound(numels: list[int], max_numel: int) -> None:
    runs = split_by_size(numels, max_numel)
    assert [index for run in runs for index in run] == list(range(len(numels)))
    for run in runs:
        assert len(run) == 1 or sum(numels[i] for i in run) <= max_numel


@pytest.mark.parametrize(
    ("numels", "max_numel", "expected"),
    [
        ([], 10**9, []),
        ([3, 4, 5], 10**9, [[0, 1, 2]]),
        ([99, 7, 5], 10**9, [[0, 1], [2]]),
        ([100, 7, 100], 10**9, [[0], [1, 2]]),
        ([3, 4, 5], 8, [[0, 1], [2]]),
        ([9, 4, 5], 8, [[0], [1], [2]]),
    ],
)
def test_small_neighbours_are_joined(numels: list[int], max_numel: int, expected: list[list[int]]) -> None:
    assert [list(run) for run in join_small(numels, 100, max_numel)] == expected
