"""The arithmetic of units and shards: every element has one place, one group and one owner."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.sharding.layout import CHUNK_ALIGNMENT_NUMEL, ParamInfo, UnitLayout, layout_unit

PARAMS = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 2)), min_size=1, max_size=12)


def lay_out(params: list[tuple[int, int]], world_size: int) -> UnitLayout:
    """Lay parameters of these sizes and optimizer groups out."""
    infos = [ParamInfo(f"p{i}", (numel,), "float32", group=group) for i, (numel, group) in enumerate(params)]
    return layout_unit(infos, world_size)


@given(PARAMS, st.integers(1, 9))
def test_every_element_has_one_owner_and_its_own_group(params: list[tuple[int, int]], world_size: int) -> None:
    layout = lay_out(params, world_size)
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
    assert set(found[len(expected) :]) <= {None}  # padding has no owner


@given(PARAMS, st.integers(1, 9), st.data())
def test_any_range_of_a_unit_is_found_by_slot(
    params: list[tuple[int, int]], world_size: int, data: st.DataObject
) -> None:
    layout = lay_out(params, world_size)
    start = data.draw(st.integers(0, layout.padded_numel))
    owned = range(start, data.draw(st.integers(start, layout.padded_numel)))
    elements = [(i, element) for i, (numel, _) in enumerate(params) for element in range(numel)]
    expected = elements[owned.start : owned.stop]
    met = layout.slots_in(owned)
    assert [(slot.index, at - slot.offset) for slot, shared in met for at in shared] == expected
    assert [(slot.index, at) for slot in layout.slots for at in slot.within(owned)] == expected


@given(PARAMS, st.integers(1, 9))
def test_chunks_are_equal_aligned_and_hardly_padded(params: list[tuple[int, int]], world_size: int) -> None:
    layout = lay_out(params, world_size)
    total = sum(numel for numel, _ in params)
    assert layout.numel == total
    assert layout.chunk_numel * world_size == layout.padded_numel
    assert layout.chunk_numel % CHUNK_ALIGNMENT_NUMEL == 0
    assert 0 <= layout.padded_numel - total < world_size * CHUNK_ALIGNMENT_NUMEL


def test_slots_carry_names_and_shapes() -> None:
    layout = layout_unit([ParamInfo("a.weight", (3, 4), "bfloat16"), ParamInfo("a.scale", (), "bfloat16")], 2)
    assert layout.names == ["a.weight", "a.scale"]
    assert [(slot.shape, slot.offset, slot.numel) for slot in layout.slots] == [((3, 4), 0, 12), ((), 12, 1)]
