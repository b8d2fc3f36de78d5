"""Maps of shards and the way from one to another, against lists that hold every element."""

from __future__ import annotations

import cProfile
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.sharding.grouping import block_of, form_units
from launcher.sharding.layout import ParamInfo, ShardMap, ShardRange, layout_unit

Element = tuple[str, int]


class Transfer(NamedTuple):
    """Elements of one parameter that a rank takes over from one shard of the source."""

    name: str
    start: int  # first element within the parameter
    source: ShardRange
    unit: int  # of the target
    offset: int  # first element, within the rank's shard of that unit

    @property
    def numel(self) -> int:
        return self.source.numel


def held_by(rank: int, unit: int, shard_map: ShardMap) -> list[tuple[str, range, int]]:
    """Return what a rank's shard of a unit holds: parameters, their elements, and where in the shard these begin."""
    layout = shard_map.layouts[unit]
    owned = layout.chunk_range(layout.chunk_of(rank) if layout.world_size > 1 else 0)
    return [
        (slot.name, range(shared.start - slot.offset, shared.stop - slot.offset), shared.start - owned.start)
        for slot, shared in layout.slots_in(owned)
    ]


def transfers_to(rank: int, source: ShardMap, target: ShardMap) -> list[Transfer]:
    """Return what fills the shards of a rank of `target`: what loading a checkpoint reads."""
    transfers = []
    for unit in range(len(target.layouts)):
        for name, wanted, offset in held_by(rank, unit, target):
            start = wanted.start
            for found in source.shards_of(name, start, wanted.stop):
                transfers.append(Transfer(name, start, found, unit, offset + start - wanted.start))
                start += found.numel
    return transfers


WORLDS = st.integers(1, 8)
SIZES = st.lists(st.integers(0, 300), min_size=1, max_size=10)


def params_of(sizes: Sequence[int]) -> list[ParamInfo]:
    return [ParamInfo(f"p{index}", (numel,), "float32") for index, numel in enumerate(sizes)]


@st.composite
def maps(draw: st.DrawFn, params: list[ParamInfo]) -> tuple[ShardMap, int]:
    """Return the parameters in any order, cut into any units, and the world size; some units may be whole."""
    order = draw(st.permutations(params))
    cuts = sorted(draw(st.sets(st.integers(1, len(params) - 1)))) if len(params) > 1 else []
    world_size = draw(WORLDS)
    ends = zip([0, *cuts], [*cuts, len(params)], strict=True)
    return ShardMap([layout_unit(order[a:b], draw(st.sampled_from([world_size, 1]))) for a, b in ends]), world_size


def shards_of(found: ShardMap, world_size: int) -> dict[tuple[int, int], list[Element | None]]:
    """Return what each rank holds of each unit, element by element; None is padding."""
    shards: dict[tuple[int, int], list[Element | None]] = {}
    for unit, layout in enumerate(found.layouts):
        flat: list[Element | None] = [(slot.name, i) for slot in layout.slots for i in range(slot.numel)]
        flat += [None] * (layout.padded_numel - len(flat))
        chunk = len(flat) // layout.world_size
        for rank in range(world_size):
            at = rank if layout.world_size > 1 else 0
            shards[unit, rank] = flat[at * chunk : (at + 1) * chunk]
    return shards


@given(SIZES.map(params_of).flatmap(maps), st.data())
def test_a_map_finds_every_element_both_ways(found: tuple[ShardMap, int], data: st.DataObject) -> None:
    shard_map, world_size = found
    shards = shards_of(shard_map, world_size)
    for (unit, rank), shard in shards.items():
        held = [None] * len(shard)
        for name, wanted, offset in held_by(rank, unit, shard_map):
            held[offset : offset + len(wanted)] = [(name, i) for i in wanted]
        assert held == shard
    for layout in shard_map.layouts:
        for slot in layout.slots:
            start = data.draw(st.integers(0, slot.numel))
            stop = data.draw(st.integers(start, slot.numel))
            places = shard_map.shards_of(slot.name, start, stop)
            elements = [shards[at.unit, at.rank][at.offset + i] for at in places for i in range(at.numel)]
            assert elements == [(slot.name, i) for i in range(start, stop)]
            assert all(at.numel for at in places)
            assert sum(at.numel for at in shard_map.shards_of(slot.name)) == slot.numel


@given(st.data())
def test_transfers_fill_every_shard_from_any_other_sharding(data: st.DataObject) -> None:
    params = params_of(data.draw(SIZES))
    source, source_world = data.draw(maps([*params, ParamInfo("only in the source", (7,), "float32")]))
    target, target_world = data.draw(maps(params))
    sent, expected = shards_of(source, source_world), shards_of(target, target_world)
    for rank in range(target_world):
        received: dict[int, list[Element | None]] = {
            unit: [None] * len(expected[unit, rank]) for unit in range(len(target.layouts))
        }
        for transfer in transfers_to(rank, source, target):
            at, here = transfer.source, slice(transfer.offset, transfer.offset + transfer.numel)
            values = sent[at.unit, at.rank][at.offset : at.offset + at.numel]
            assert set(received[transfer.unit][here]) == {None}, "every element comes once"
            assert values == [(transfer.name, transfer.start + i) for i in range(transfer.numel)]
            received[transfer.unit][here] = values
        assert received == {unit: expected[unit, rank] for unit in received}


def test_the_same_sharding_copies_each_rank_s_own_shard() -> None:
    same = ShardMap([layout_unit(params_of([300, 200, 100]), 3)])
    for rank in range(3):
        for transfer in transfers_to(rank, same, same):
            assert (transfer.source.rank, transfer.source.offset) == (rank, transfer.offset)


def test_names_that_are_there_twice_are_errors() -> None:
    source = ShardMap([layout_unit([ParamInfo("a", (4, 2), "float32")], 2)])
    with pytest.raises(ValueError, match="two parameters are named a"):
        ShardMap([*source.layouts, *source.layouts])


def llama_7b(world_size: int, max_unit_numel: int) -> ShardMap:
    """Return the map of a model with the shapes of Llama-7B."""
    hidden, ffn, vocabulary = 4096, 11008, 32000
    block = {f"self_attn.{part}_proj.weight": (hidden, hidden) for part in "qkvo"}
    block |= {"mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden)}
    block |= {"mlp.down_proj.weight": (hidden, ffn), "input_norm.weight": (hidden,), "post_norm.weight": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(32) for name, shape in block.items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    params = [ParamInfo(name, shape, "bfloat16") for name, shape in shapes.items()]
    units = form_units(
        [param.numel for param in params], [block_of(name) for name in shapes], min_numel=0, max_numel=max_unit_numel
    )
    return ShardMap([layout_unit([params[index] for index in unit], world_size) for unit in units])


def test_thousands_of_ranks_cost_what_they_hold() -> None:
    ranks = [0, 1, 1023, 2046, 2047]
    with cProfile.Profile() as profile:
        source, target = llama_7b(3000, 500_000_000), llama_7b(2048, 50_000_000)
        transfers = {rank: transfers_to(rank, source, target) for rank in ranks}
    whole = ShardMap([layout_unit([slot.param for slot in unit.slots], 1) for unit in source.layouts])
    everything = transfers_to(0, source, whole)
    for rank in ranks:
        held = sum(len(wanted) for unit in range(len(target.layouts)) for _, wanted, _ in held_by(rank, unit, target))
        assert sum(transfer.numel for transfer in transfers[rank]) == held > 0
        assert len(transfers[rank]) <= 5 * len(target.layouts)
    assert sum(transfer.numel for transfer in everything) == 6_738_415_616
    num_calls = sum(entry.callcount for entry in profile.getstats())
    assert num_calls < 100 * sum(map(len, transfers.values())), "each rank of a restart computes this for itself"
