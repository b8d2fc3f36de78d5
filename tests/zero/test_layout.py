"""Layout arithmetic: every element is owned exactly once."""

from __future__ import annotations

import pytest

from launcher.zero.layout import ParamSpec, plan_units

SPECS = [ParamSpec("a", 7, "f", "x"), ParamSpec("b", 100, "h", "x"), ParamSpec("c", 301, "f", "y", 1)]


@pytest.mark.parametrize("world", [1, 2, 4, 7])
@pytest.mark.parametrize("bound", [1, 10, 1000])
def test_every_element_has_one_owner(world: int, bound: int) -> None:
    owned: dict[str, list[int]] = {spec.name: [] for spec in SPECS}
    for unit in plan_units(SPECS, world, bound):
        assert len({slot.spec.dtype for slot in unit.slots}) == 1
        for rank in range(world):
            for part in unit.shard_ranges(rank):
                assert part.shard_start + part.numel <= unit.shard_numel
                position = rank * unit.shard_numel + part.shard_start
                assert position == part.slot.start + part.param_start
                owned[part.slot.spec.name] += range(part.param_start, part.param_start + part.numel)
    assert owned == {spec.name: list(range(spec.numel)) for spec in SPECS}


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        plan_units([SPECS[0], SPECS[0]], 2, 10)
