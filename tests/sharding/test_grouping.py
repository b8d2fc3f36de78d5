"""Which parameters form a unit: those of one key, joined when small, cut when large, each exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.sharding.grouping import block_of, choose_small, form_units, join_small, split_by_size

KEYED = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 4)), max_size=20)


@given(KEYED, st.integers(0, 150), st.integers(1, 150))
def test_every_parameter_is_in_one_unit_and_units_keep_the_bound(
    params: list[tuple[int, int]], min_numel: int, max_numel: int
) -> None:
    numels, keys = [numel for numel, _ in params], [key for _, key in params]
    units = form_units(numels, keys, min_numel=min_numel, max_numel=max_numel)
    assert sorted(index for unit in units for index in unit) == list(range(len(params)))
    for unit in units:
        assert len(unit) == 1 or sum(numels[index] for index in unit) <= max_numel
        if min_numel == 0:
            assert len({keys[index] for index in unit}) == 1


def test_parameters_of_one_key_form_one_unit_where_the_first_of_them_stands() -> None:
    keys = ["", "h.0", "h.0", "h.1", ""]
    assert form_units([5, 5, 5, 5, 5], keys, min_numel=0, max_numel=100) == [[0, 4], [1, 2], [3]]
    assert form_units([5, 5, 5, 5, 5], keys, min_numel=12, max_numel=100) == [[0, 4, 1, 2], [3]]
    assert form_units([5, 5, 5, 5, 5], keys, min_numel=0, max_numel=5) == [[0], [4], [1], [2], [3]]


def test_kinds_are_apart_and_of_one_kind_all_are_neighbours() -> None:
    keys, kinds = ["a", "a", "b", "b"], [False, True, False, True]
    assert form_units([5, 5, 5, 5], keys, kinds, min_numel=0, max_numel=100) == [[0], [1], [2], [3]]
    assert form_units([5, 5, 5, 5], keys, kinds, min_numel=12, max_numel=100) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.3.mlp.up.weight", "model.layers.3"),
        ("h.0.experts.7.weight", "h.0"),
        ("0.weight", "0"),
        ("wte.weight", ""),
        ("conv1.weight", ""),
    ],
)
def test_the_block_of_a_name(name: str, block: str) -> None:
    assert block_of(name) == block


def test_small_parameters_are_chosen_in_order_up_to_a_total() -> None:
    assert choose_small([9, 10, 3, 9, 1], 10, 20) == {0, 2, 4}  # the second 9 would exceed the total, the 1 does not
    assert choose_small([1, 2], 0, 100) == set()


@given(st.lists(st.integers(1, 100), max_size=20), st.integers(1, 150))
def test_cuts_cover_all_parameters_in_order_and_keep_the_bound(numels: list[int], max_numel: int) -> None:
    cuts = split_by_size(numels, max_numel)
    assert [index for cut in cuts for index in cut] == list(range(len(numels)))
    for cut in cuts:
        assert len(cut) == 1 or sum(numels[i] for i in cut) <= max_numel


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
    assert [list(joined) for joined in join_small(numels, 100, max_numel)] == expected
