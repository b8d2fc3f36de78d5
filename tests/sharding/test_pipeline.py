"""Partitions of layers into stages, against all that there are."""

from __future__ import annotations

import itertools
import random

import pytest

from launcher.base.errors import ConfigError
from launcher.sharding.pipeline import partition


def test_the_heaviest_stage_is_as_light_as_in_any_partition() -> None:
    draw = random.Random(5)
    for _ in range(400):
        weights = [draw.choice([0, 1, 2, draw.randint(0, 9), draw.random()]) for _ in range(draw.randint(1, 8))]
        num_stages = draw.randint(1, len(weights))
        found = partition(weights, num_stages)
        assert [index for stage in found for index in stage] == list(range(len(weights)))
        assert len(found) == num_stages
        assert all(found)
        every = (
            [weights[start:stop] for start, stop in itertools.pairwise((0, *cuts, len(weights)))]
            for cuts in itertools.combinations(range(1, len(weights)), num_stages - 1)
        )
        assert _cost([[weights[index] for index in stage] for stage in found]) == min(map(_cost, every)), weights


def _cost(stages: list[list[float]]) -> tuple[float, float]:
    sums = [sum(stage) for stage in stages]
    return round(max(sums), 9), round(sum(total * total for total in sums), 6)


def test_fewer_layers_than_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 layers cannot be divided into 4 stages") as caught:
        partition([1.0] * 3, 4)
    assert "at most 3 stages" in str(caught.value)


def test_a_thousand_layers_are_divided_at_once() -> None:
    assert len(partition([1.0 + index % 7 for index in range(1000)], 64)) == 64
