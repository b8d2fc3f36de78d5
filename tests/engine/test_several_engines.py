"""Several engines in one process: losses that share a graph, one model after the other, one model again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from harness.train.parity import weight_distance
from harness.train.ranks import run_on_ranks
from harness.train.zoo import LR, SAMPLES, WEIGHT_DECAY, WIDTH, batches, build, train_plain
from torch import Tensor, nn
from torch.nn import functional as F

import launcher
from launcher.base.errors import EngineError
from launcher.zero.gathered import GatheredParameters

STEPS = 3
STAGES = [0, 1, 2, 3]


def config(stage: int, world_size: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "gradient_clipping": 0.0,
        "steps_per_print": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
    }


def engine_of(model: nn.Module, stage: int, world_size: int) -> Any:
    return launcher.initialize(model=model, config=config(stage, world_size))[0]


# ---- a generator and a discriminator, as everybody writes them ----


def _networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return tuple(nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, size)) for size in (WIDTH, 1))  # type: ignore[return-value]


def _adversarial_losses(generator: Any, discriminator: Any, x: Tensor) -> Any:
    """Yield the discriminator's loss, then the generator's."""
    fake = generator(-x)
    yield F.softplus(-discriminator(x)).mean() + F.softplus(discriminator(fake.detach())).mean()
    yield F.softplus(-discriminator(fake)).mean()


def _adversarial(rank: int, world_size: int, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator, discriminator = (engine_of(network, stage, world_size) for network in _networks())
    for x, _ in batches(STEPS):
        losses = _adversarial_losses(generator, discriminator, x.chunk(world_size)[rank])
        for engine in (discriminator, generator):
            engine.backward(next(losses))
            engine.step()
    return generator.state_dict(), discriminator.state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_a_generator_and_a_discriminator(stage: int) -> None:
    generator, discriminator = _networks()
    optimizers = {
        network: torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
        for network in (generator, discriminator)
    }
    for x, _ in batches(STEPS):
        losses = _adversarial_losses(generator, discriminator, x)
        for network in (discriminator, generator):
            loss = next(losses)
            optimizers[network].zero_grad()
            loss.backward()
            optimizers[network].step()
    for found in run_on_ranks(2, _adversarial, stage):
        for network, weights in zip((generator, discriminator), found, strict=True):
            assert weight_distance(weights, dict(network.state_dict())) <= 2e-6


class _WithEncoder(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(WIDTH, 1)


def _share_an_encoder(rank: int, world_size: int) -> None:
    encoder = nn.Linear(WIDTH, WIDTH)
    first = engine_of(_WithEncoder(encoder), 2, world_size)
    with pytest.raises(EngineError, match=r"encoder\.weight belongs to the engine of another"):
        engine_of(_WithEncoder(encoder), 2, world_size)
    first.destroy()
    engine_of(_WithEncoder(encoder), 2, world_size)


def test_a_shared_encoder_is_refused_while_its_engine_lives() -> None:
    run_on_ranks(2, _share_an_encoder)


# ---- one model again ----


def _hooks_of(model: nn.Module) -> int:
    found = 0
    for module in model.modules():
        found += len(module._forward_pre_hooks) + len(module._forward_hooks)
    for param in model.parameters():
        found += len(param._post_accumulate_grad_hooks or ())
    return found


def _train(engine: Any, rank: int, world_size: int) -> None:
    for x, y in batches(STEPS):
        engine.backward(engine(x.chunk(world_size)[rank], y.chunk(world_size)[rank]))
        engine.step()


def _begin_again(rank: int, world_size: int, stage: int, destroys: bool) -> dict[str, Tensor]:
    model = build("Plain")
    original = {name: value.clone() for name, value in model.state_dict().items()}
    first = engine_of(model, stage, world_size)
    num_hooks = _hooks_of(model)
    _train(first, rank, world_size)
    units = [weakref.ref(unit) for unit in first._sharded.units]
    if destroys:
        first.destroy()
        first.destroy()
        assert _hooks_of(model) == 0
        assert all(type(module._parameters) is dict for module in model.modules())
    second = engine_of(model, stage, world_size)
    with pytest.raises(EngineError, match="this engine has ended"):
        first(*batches(1)[0])
    with pytest.raises(EngineError, match="this engine has ended"):
        first.step()
    del first
    gc.collect()
    assert not any(reference() for reference in units), "units of the first engine are still there"
    assert _hooks_of(model) == num_hooks
    second.load_state_dict(original)
    _train(second, rank, world_size)
    return second.state_dict()


@pytest.mark.parametrize("destroys", [False, True], ids=["initialize again", "destroy"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_may_be_initialized_again(stage: int, destroys: bool) -> None:
    _, expected = train_plain("Plain", STEPS)
    for weights in run_on_ranks(2, _begin_again, stage, destroys):
        assert weight_distance(weights, expected) <= 2e-6


def _give_back(rank: int, world_size: int, stage: int) -> tuple[float, float]:
    """Train, destroy, and run the bare model."""
    model = build("Plain")
    engine = engine_of(model, stage, world_size)
    _train(engine, rank, world_size)
    expected = engine(*batches(1)[0]).item()
    engine.destroy()
    del engine
    x, y = batches(1)[0]
    with GatheredParameters(model.parameters()):
        loss = model(x, y)
        loss.backward()
        assert all(param.grad is not None for param in model.parameters())
    return expected, loss.item()


@pytest.mark.parametrize("stage", STAGES)
def test_a_destroyed_engine_gives_its_model_back(stage: int) -> None:
    for expected, found in run_on_ranks(2, _give_back, stage):
        assert found == pytest.approx(expected, rel=1e-6)
