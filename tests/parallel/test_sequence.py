"""Sequence parallelism in the engine: every stage trains as one process does, and saves what any other mesh loads."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.train import sequences
from harness.train.decoder import PARITY_STEPS
from harness.train.parity import weight_distance
from harness.train.ranks import run_on_ranks
from harness.train.sequences import BATCH, batch_of, make_decoder
from torch import Tensor

import launcher


@functools.cache
def expected(num_steps: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    return sequences.reference(num_steps)


def make_engine(world_size: int, sequence: int, stage: int, key_heads: int = 2, **more: Any) -> Any:
    num_samples = BATCH * sequence // world_size // more.get("gradient_accumulation_steps", 1)
    config = sequences.config(stage, num_samples, sequence, **more)
    return launcher.initialize(model=make_decoder(key_heads), config=config)[0]


def train(engine: Any, num_steps: int) -> tuple[list[float], list[float]]:
    """Take steps from where the engine is; return the losses of all samples, and the norms."""
    num_parts, size = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
    losses, norms = [], []
    for _ in range(num_steps):
        batch, step_losses = batch_of(engine.global_steps), []
        for part in range(num_parts):
            first = (engine.get_data_parallel_rank() * num_parts + part) * size
            own = launcher.shard_sequence({name: value[first : first + size] for name, value in batch.items()})
            loss = launcher.sequence_loss(engine(**own), own["shift_labels"])
            engine.backward(loss)
            engine.step()
            step_losses.append(loss.detach().double())
        mean = torch.stack(step_losses).mean()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / engine.world_size)
        norms.append(engine.get_global_grad_norm())
    return losses, norms


def _trained(rank: int, world_size: int, sequence: int, stage: int, num_steps: int, more: dict[str, Any]) -> Any:
    torch.manual_seed(rank)
    engine = make_engine(world_size, sequence, stage, **more)
    losses, norms = train(engine, num_steps)
    weights = engine.state_dict()
    engine.destroy()
    return losses, norms, weights


@pytest.mark.parametrize("num_steps", PARITY_STEPS)
@pytest.mark.parametrize(
    ("world_size", "sequence", "stage", "more"),
    [
        (2, 2, 0, {}),
        (2, 2, 1, {"seq_parallel_communication_data_type": "fp32"}),
        (2, 2, 3, {}),
        (4, 2, 1, {}),
        (4, 2, 2, {"gradient_accumulation_steps": 2}),
        (4, 2, 3, {}),
        (4, 4, 3, {}),
    ],
)
def test_every_stage_trains_as_one_process_does(
    world_size: int, sequence: int, stage: int, more: dict[str, Any], num_steps: int
) -> None:
    losses, norms, weights = expected(num_steps)
    found = run_on_ranks(world_size, _trained, sequence, stage, num_steps, more)
    for found_losses, found_norms, found_weights in found:
        assert found_losses == pytest.approx(losses, rel=1e-6)
        assert found_norms == pytest.approx(norms, rel=1e-4)
        assert weight_distance(found_weights, weights) <= 1e-4


MESHES = {"sequence 2": (2, 2, 1), "data 2 x sequence 2": (4, 2, 3), "data 2": (2, 1, 2), "sequence 4": (4, 4, 0)}


def _saved(rank: int, world_size: int, sequence: int, stage: int, folder: str) -> None:
    engine = make_engine(world_size, sequence, stage)
    train(engine, 3)
    engine.save_checkpoint(folder)
    engine.destroy()


def _continued(rank: int, world_size: int, sequence: int, stage: int, folders: list[str]) -> list[list[float]]:
    engine, found = make_engine(world_size, sequence, stage), []
    for folder in folders:
        engine.load_checkpoint(folder)
        found.append(train(engine, 3)[0])
    engine.destroy()
    return found


def test_a_checkpoint_continues_on_every_other_mesh(tmp_path: Path) -> None:
    folders = []
    for name, (world_size, sequence, stage) in MESHES.items():
        folders.append(str(tmp_path / name))
        run_on_ranks(world_size, _saved, sequence, stage, folders[-1])
    for world_size, sequence, stage in MESHES.values():
        for found in run_on_ranks(world_size, _continued, sequence, stage, folders):
            for losses in found:
                assert losses == pytest.approx(expected(6)[0][3:], rel=1e-6)


def _in_16_bits(rank: int, world_size: int, sequence: int) -> tuple[list[float], list[float], str]:
    more = {"bf16": {"enabled": True}, "activation_checkpointing": {"partition_activations": False}}
    engine = make_engine(world_size, sequence, 2, **more)
    losses, norms = train(engine, 6)
    engine.eval()
    with torch.no_grad():
        own = launcher.shard_sequence(batch_of(99))
        losses.append(launcher.sequence_loss(engine(**own), own["shift_labels"]).item())
    wire = str(engine._parts.policy.precision.wire)
    engine.destroy()
    return losses, norms, wire


def test_16_bit_parameters_train_as_one_16_bit_process_does() -> None:
    alone, norms, _ = run_on_ranks(1, _in_16_bits, 1)[0]
    for losses, found_norms, wire in run_on_ranks(2, _in_16_bits, 2):
        assert losses == pytest.approx(alone, rel=2e-3)
        assert found_norms == pytest.approx(norms, rel=2e-2)
        assert wire == "DType.FP32", "the default of seq_parallel_communication_data_type"


class Recomputing(torch.nn.Module):
    """Recomputes a model's inside in backward, which exchanges heads again then."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(self.inner, use_reentrant=False, **batch)


def _summed(rank: int, world_size: int) -> float:
    engine = make_engine(world_size, 2, 1, gradient_allreduce_op="sum")
    norm = train(engine, 1)[1][0]
    engine.destroy()
    return norm


def test_gradients_of_samples_are_summed_and_those_of_parts_are_not() -> None:
    for norm in run_on_ranks(4, _summed):  # of two ranks with different samples
        assert norm == pytest.approx(2 * expected(1)[1][0], rel=1e-5)


def _recomputed(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    config = sequences.config(3, BATCH, world_size)
    engine = launcher.initialize(model=Recomputing(make_decoder()), config=config)[0]
    found = train(engine, 3)
    engine.destroy()
    return found


def test_attention_is_recomputed_in_backward() -> None:
    for losses, norms in run_on_ranks(2, _recomputed):
        assert losses == pytest.approx(expected(3)[0], rel=1e-6)
        assert norms == pytest.approx(expected(3)[1], rel=1e-4)


def _with_tensor_ranks(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(7)
    plan = {
        "attentions.*.query": "column",
        "attentions.*.key": "column",
        "attentions.*.value": "column",
        "attentions.*.out": "row",
    }
    model = launcher.tp_model_init(make_decoder(), tp_size=2, plan=plan)
    config = sequences.config(1, BATCH, 2, tensor_parallel={"autotp_size": 2})
    engine = launcher.initialize(model=model, config=config)[0]
    found = train(engine, 3)
    engine.destroy()
    return found


def test_heads_are_divided_by_tensor_and_sequence_ranks() -> None:
    for losses, norms in run_on_ranks(4, _with_tensor_ranks):
        assert losses == pytest.approx(expected(3)[0], rel=1e-6)
        assert norms == pytest.approx(expected(3)[1], rel=1e-4)
