"""A topology's process groups: `PipelineParallelGrid`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness.ranks import run_on_ranks
from torch import distributed as dist

from launcher.base.errors import EngineError
from launcher.compat.grid import PipelineParallelGrid, _prime_factors
from launcher.parallel.pipeline.topology import PipeDataParallelTopology, ProcessTopology


def _facts(rank: int, _world: int) -> dict[str, Any]:
    grid = PipelineParallelGrid(PipeDataParallelTopology(num_pp=2, num_dp=1))
    sums = []
    for group in (grid.get_pipe_parallel_group(), grid.get_data_parallel_group(), grid.get_model_parallel_group()):
        number = torch.tensor([rank + 1])
        dist.all_reduce(number, group=group)
        sums.append(int(number))
    with pytest.raises(EngineError, match="the topology has 4 ranks, the job 2"):
        PipelineParallelGrid(ProcessTopology(["pipe", "data"], [2, 2]))
    return {
        "sums": sums,
        "stage": (grid.get_stage_id(), grid.is_first_stage, grid.is_last_stage),
        "ranks": (grid.pp_group, grid.dp_group, grid.slice_group),
        "model": (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()),
        "next": grid.stage_to_global(1, data=0),
        "default": PipelineParallelGrid().topology().dims,
    }


def test_each_rank_finds_its_groups() -> None:
    first, second = run_on_ranks(2, _facts)
    assert first == {
        "sums": [3, 1, 3],
        "stage": (0, True, False),
        "ranks": ([0, 1], [0], [0]),
        "model": (0, 2),
        "next": 1,
        "default": [2, 1],
    }
    assert second == {
        **first,
        "sums": [3, 2, 3],
        "stage": (1, False, True),
        "ranks": ([0, 1], [1], [1]),
        "model": (1, 2),
    }


def test_prime_factors_multiply_to_the_number() -> None:
    for number in range(1, 200):
        factors = _prime_factors(number)
        assert math.prod(factors) == number
        assert all(_prime_factors(factor) == [factor] for factor in factors)
    with pytest.raises(ValueError, match="0 has no prime factors"):
        _prime_factors(0)
