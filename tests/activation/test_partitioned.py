"""Inputs of checkpointed functions that the ranks of a model-parallel group keep together."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from harness.train.ranks import run_on_ranks
from torch import nn

WIDTH, LAYERS = 8, 3


class Mpu:
    """What Megatron-style scripts hand over: here the group of all ranks."""

    def get_model_parallel_rank(self) -> int:
        return torch.distributed.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return torch.distributed.get_world_size()

    def get_model_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD


def train(rank: int, world_size: int, num_samples: int, said: dict[str, Any] | None) -> tuple[list[torch.Tensor], int]:
    """Return the gradients, and the elements of inputs this rank kept. said: None computes without checkpoints."""
    from launcher import checkpointing
    from launcher.activation import settings
    from launcher.activation.saved import _Kept

    settings._sources = settings._Sources()
    torch.manual_seed(4)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2)) for _ in range(LAYERS)]
    x = torch.randn(num_samples, WIDTH, requires_grad=True)
    if said is not None:
        checkpointing.configure(Mpu(), partition_activations=True, **said)
    hidden = x
    for layer in layers:
        hidden = layer(hidden) if said is None else checkpointing.checkpoint(layer, hidden)
    kept = [item for item in gc.get_objects() if type(item) is _Kept]
    num_kept = sum(item.elements.numel() for item in kept)
    del kept
    hidden.square().sum().backward()
    assert not any(type(item) is _Kept for item in gc.get_objects())
    settings._sources = settings._Sources()
    return [x.grad, *(param.grad for layer in layers for param in layer.parameters())], num_kept


@pytest.mark.parametrize("said", [{}, {"contiguous_checkpointing": True, "num_checkpoints": LAYERS}])
@pytest.mark.parametrize(("world_size", "num_samples"), [(2, 6), (3, 5)])
def test_each_rank_keeps_its_part(world_size: int, num_samples: int, said: dict[str, Any]) -> None:
    expected = run_on_ranks(world_size, train, num_samples, None)
    found = run_on_ranks(world_size, train, num_samples, said)
    for (grads, num_kept), (expected_grads, _) in zip(found, expected, strict=True):
        assert all(torch.equal(grad, other) for grad, other in zip(grads, expected_grads, strict=True))
        assert num_kept == LAYERS * -(-num_samples * WIDTH // world_size)


def _seeded(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Return numbers from the default random state and from that of this rank."""
    from launcher import checkpointing
    from launcher.activation import settings

    settings._sources = settings._Sources()
    checkpointing.configure(Mpu())
    checkpointing.model_parallel_cuda_manual_seed(9)
    with checkpointing.get_cuda_rng_tracker().fork():
        own = torch.rand(3).tolist()
    settings._sources = settings._Sources()
    return torch.rand(3).tolist(), own


def test_ranks_share_one_random_state_and_have_one_of_their_own() -> None:
    (first, first_own), (second, second_own) = run_on_ranks(2, _seeded)
    assert first == second
    assert first_own != second_own
