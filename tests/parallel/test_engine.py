"""Tensor parallelism in the engine: every stage trains as one process does, and saves what any other mesh loads."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.train import decoder
from harness.train.decoder import BATCH, PARITY_STEPS, batch_of, make_decoder
from harness.train.parity import weight_distance
from harness.train.ranks import run_on_ranks
from torch import Tensor

import launcher
from launcher.base.errors import ConfigError, EngineError
from launcher.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

SAVED, CONTINUED = 2, 2  # steps before and after a checkpoint; a state that is not the saved one shows in the second


@functools.cache
def expected(num_steps: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    return decoder.reference(num_steps)


def make_engine(tensor: int, stage: int, world_size: int, **more: Any) -> Any:
    parallel = {"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}
    config = decoder.config(stage, world_size // tensor, **parallel, **more)
    return launcher.initialize(model=make_decoder(), config=config)[0]


def train(engine: Any, num_steps: int) -> tuple[list[float], list[float]]:
    """Take steps from where the engine is; return the mean losses of all samples, and the norms."""
    rank, share = engine.get_data_parallel_rank(), BATCH // engine.dp_world_size
    losses, norms = [], []
    for _ in range(num_steps):
        loss = engine(batch_of(engine.global_steps)[rank * share : (rank + 1) * share])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / engine.world_size)
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def _trained(rank: int, world_size: int, tensor: int, stage: int, num_steps: int, more: dict[str, Any]) -> Any:
    torch.manual_seed(rank)
    engine = make_engine(tensor, stage, world_size, **more)
    losses, norms = train(engine, num_steps)
    weights = engine.state_dict()
    engine.destroy()
    return losses, norms, weights


@pytest.mark.parametrize("num_steps", PARITY_STEPS)
@pytest.mark.parametrize(
    ("world_size", "tensor", "stage", "more"),
    [
        (2, 2, 0, {}),
        (2, 2, 1, {}),
        (2, 2, 3, {}),
        (4, 2, 0, {}),
        (4, 2, 1, {}),
        (4, 2, 2, {}),
        (4, 2, 3, {}),
        (4, 4, 2, {}),
        (4, 2, 1, {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}),
    ],
)
def test_every_stage_trains_as_one_process_does(
    world_size: int, tensor: int, stage: int, more: dict[str, Any], num_steps: int
) -> None:
    losses, norms, weights = expected(num_steps)
    found = run_on_ranks(world_size, _trained, tensor, stage, num_steps, more)
    for found_losses, found_norms, found_weights in found:
        assert found_losses == pytest.approx(losses, rel=1e-6)
        assert found_norms == pytest.approx(norms, rel=1e-4)
        assert weight_distance(found_weights, weights) <= 1e-4
        assert found_norms == found[0][1], "ranks clip alike, to the bit"


def _saved(rank: int, world_size: int, tensor: int, stage: int, folder: str) -> None:
    engine = make_engine(tensor, stage, world_size)
    train(engine, SAVED)
    engine.save_checkpoint(folder)
    engine.destroy()


def _continued(rank: int, world_size: int, tensor: int, stage: int, folders: list[str]) -> list[list[float]]:
    torch.manual_seed(50)
    model = make_decoder()
    for param in model.parameters():
        param.data.fill_(0.3)
    parallel = {"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}
    engine = launcher.initialize(model=model, config=decoder.config(stage, world_size // tensor, **parallel))[0]
    found = []
    for folder in folders:
        engine.load_checkpoint(folder)
        found.append(train(engine, CONTINUED)[0])
    engine.destroy()
    return found


MESHES = {"tensor 2": (2, 2, 1), "tensor 2 x data 2": (4, 2, 3), "data 2": (2, 1, 2), "tensor 4": (4, 4, 0)}


def test_a_checkpoint_continues_on_every_other_mesh(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in MESHES]
    for (world_size, tensor, stage), folder in zip(MESHES.values(), folders, strict=True):
        run_on_ranks(world_size, _saved, tensor, stage, folder)
    for world_size, tensor, stage in MESHES.values():
        for found in run_on_ranks(world_size, _continued, tensor, stage, folders):
            for losses in found:
                assert losses == pytest.approx(expected(SAVED + CONTINUED)[0][SAVED:], rel=1e-6)
    for folder in folders:
        assert weight_distance(get_fp32_state_dict_from_zero_checkpoint(folder), expected(SAVED)[2]) <= 1e-4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"optimizer": {"type": "Lamb", "params": {"lr": 1e-3}}}, "Lamb needs whole parameters"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "mics_shard_size is for data parallelism alone"),
        ({"tensor_parallel": {"autotp_size": 3}}, r"1 (data) × 3 (tensor) = 3 does not divide the 2 ranks"),
    ],
)
def test_what_cannot_be_combined_is_refused_with_the_reason(more: dict[str, Any], message: str) -> None:
    for error in run_on_ranks(2, _refused, more):
        assert message in error


def _refused(rank: int, world_size: int, more: dict[str, Any]) -> str:
    config = {**decoder.config(1, 1), "tensor_parallel": {"autotp_size": 2}, **more}
    try:
        launcher.initialize(model=make_decoder(), config=config)
    except (ConfigError, EngineError) as error:
        return str(error)
    return ""


class Mpu:
    """Groups of model parallelism as Megatron has them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // self.size


def _with_mpu(rank: int, world_size: int) -> tuple[list[float], str]:
    def start(tensor: int) -> Any:
        config = decoder.config(1, 1, tensor_parallel={"autotp_size": tensor})
        return launcher.initialize(model=make_decoder(), config=config, mpu=Mpu(2))[0]

    engine = start(2)
    losses = train(engine, 2)[0]
    engine.destroy()
    with pytest.raises(EngineError) as error:
        start(1)
    return losses, str(error.value)


def test_groups_of_model_parallelism_must_be_those_of_the_config() -> None:
    for losses, error in run_on_ranks(2, _with_mpu):
        assert losses == pytest.approx(expected(2)[0], rel=1e-5)
        assert "model parallelism of 2 ranks in initialize(mpu=...), and of 1 in the config" in error


def _mixed(rank: int, world_size: int) -> str:
    engine = make_engine(2, 1, world_size)
    try:
        engine(batch_of(rank))
    except EngineError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_ranks_of_one_layer_with_different_samples_are_told() -> None:
    for error in run_on_ranks(2, _mixed):
        assert "the 2 ranks that share layers got different inputs" in error
        assert "get_data_parallel_rank()" in error


def _scaled(rank: int, world_size: int, partition: dict[str, Any]) -> str:
    """Train a model that has a parameter of its own between a column- and a row-split layer."""
    model = make_decoder()
    model.layers[0].attention.scale = torch.nn.Linear(1, 1, bias=False)
    model.layers[0].attention.o_proj.register_forward_pre_hook(
        lambda module, inputs: inputs[0] * model.layers[0].attention.scale.weight[0]
    )
    parallel = {"tensor_parallel": {"autotp_size": 2, **partition}}
    engine = launcher.initialize(model=model, config=decoder.config(1, 1, **parallel))[0]
    try:
        train(engine, 1)
    except EngineError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_a_parameter_that_would_drift_apart_is_named() -> None:
    for error in run_on_ranks(2, _scaled, {}):
        assert "the gradient of layers.0.attention.scale.weight differs between the ranks of one layer" in error
    spec = {"patterns": [r".*\.scale"], "partition_type": "skip", "grad_allreduce": True}
    assert run_on_ranks(2, _scaled, {"partition_config": {"layer_specs": [spec]}}) == ["", ""]
