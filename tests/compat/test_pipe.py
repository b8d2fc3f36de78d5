"""DeepSpeed's `PipelineModule`, which is divided where it is built, and `PipelineParallelGrid`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness.train.ranks import run_on_ranks
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

import launcher
from launcher.base.errors import ConfigError, EngineError
from launcher.compat.pipe import PipelineModule, PipelineParallelGrid, _prime_factors
from launcher.parallel.pipeline.specs import LayerSpec, TiedLayerSpec
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


WIDTH, LAYERS = 6, 4
INTERLEAVED = {"virtual_stages": 2, "schedule": "interleaved_1f1b"}


def _specs() -> list[Any]:
    return [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(LAYERS)]


def _config(**pipeline: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "pipeline": pipeline,
    }


def _losses(model: Any, params: Any = None) -> list[float]:
    engine, _, _, _ = launcher.initialize(model=model, model_parameters=params, config=_config())
    torch.manual_seed(0)
    batch = (torch.randn(3, WIDTH), torch.randn(3, WIDTH))
    found = [float(engine.train_batch(iter([batch]))) for _ in range(3)]
    engine.destroy()
    return found


def _divided_at_once(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(5)
    model = PipelineModule(_specs(), num_stages=2, loss_fn=F.mse_loss)
    num_params = sum(param.numel() for param in model.parameters())
    has_values = not any(param.is_meta for param in model.parameters())
    x = torch.ones(2, WIDTH)
    output, wanted = model(x), x
    for layer in model.children():
        wanted = layer(wanted)
    facts = (model.num_pipeline_stages(), model.stage_owner(1), model.stage_owner(2), model.topology().dims)
    stage = model.mpu().get_stage_id()
    errors = []
    for pipeline in ({"partition": "uniform"}, {"seed_layers": True}, INTERLEAVED):
        with pytest.raises((ConfigError, EngineError)) as found:
            launcher.initialize(model=model, config=_config(**pipeline))
        errors.append(str(found.value))
    losses = _losses(model, [param for param in model.parameters() if param.requires_grad])
    torch.manual_seed(5)
    later = _losses(launcher.PipelineModule(_specs(), num_stages=2, loss_fn=F.mse_loss))
    alone = PipelineModule(_specs())  # the config says how many stages
    is_whole = all(param.is_meta for param in alone.parameters()) and len(list(alone.parameters())) == 2 * LAYERS
    return {
        "params": num_params,
        "has_values": has_values,
        "runs its layers": torch.equal(output, wanted),
        "facts": facts,
        "stage": stage,
        "errors": errors,
        "same losses": losses == later and losses[-1] < losses[0],
        "is_whole": is_whole,
    }


def test_a_model_is_divided_where_it_is_built_and_trains_as_one_that_is_divided_later() -> None:
    of_ranks = run_on_ranks(2, _divided_at_once)
    for rank, found in enumerate(of_ranks):
        by_method, by_seeds, by_stages = found.pop("errors")
        assert 'divided into stages by "parameters" already' in by_method
        assert "PipelineModule(seed_layers=True)" in by_seeds
        assert "it cannot become stages" in by_stages
        assert found == {
            "params": LAYERS // 2 * (WIDTH * WIDTH + WIDTH),
            "has_values": True,
            "runs its layers": True,
            "facts": (2, 0, 1, [2, 1]),
            "stage": rank,
            "same losses": True,
            "is_whole": True,
        }


def test_outside_of_a_job_nothing_is_divided_yet() -> None:
    model = PipelineModule(_specs(), num_stages=2)
    with pytest.raises(EngineError, match="not been divided into stages yet"):
        model(torch.ones(2, WIDTH))
    with pytest.raises(ValueError, match="there is no layer 1 in 0 stages"):
        model.stage_owner(1)
    with pytest.raises(EngineError, match="the number of stages is the config's"):
        PipelineModule(_specs()).topology()


def _tied(rank: int, _world_size: int) -> tuple[list[str], list[float], list[float]]:
    def layers() -> list[Any]:
        torch.manual_seed(5)
        ends = [TiedLayerSpec("end", nn.Linear, WIDTH, WIDTH) for _ in range(2)]
        return [ends[0], LayerSpec(nn.Linear, WIDTH, WIDTH), nn.Tanh(), ends[1]]

    at_once = PipelineModule(layers(), num_stages=2, loss_fn=F.mse_loss)
    names = [name for name, _ in at_once.named_parameters() if name.startswith("tied")]
    return names, _losses(at_once), _losses(launcher.PipelineModule(layers(), num_stages=2, loss_fn=F.mse_loss))


def test_tied_layers_of_a_model_that_is_divided_at_once() -> None:
    for names, at_once, later in run_on_ranks(2, _tied):
        assert names == ["tied_modules.end.weight", "tied_modules.end.bias"]
        assert at_once == later
