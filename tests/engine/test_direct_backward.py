"""`loss.backward()` of what an engine has returned does what it does in a plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from harness.train.parity import weight_distance
from harness.train.ranks import run_on_ranks
from harness.train.zoo import LR, WEIGHT_DECAY, WIDTH, batches, build, engine_of, train_plain
from torch import Tensor, nn
from torch.nn import functional as F

import launcher
from launcher.base.errors import EngineError

STEPS = 3
STAGES = [0, 1, 2, 3]
PLACES = [(stage, world_size) for stage in STAGES for world_size in (1, 2)]


class TwoOutputs(nn.Module):
    """Returns a hidden state, and what it computes from it."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.lower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.upper = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.lower(x)
        return {"hidden": hidden, "out": self.upper(hidden).squeeze(-1)}


# ---- one step of a script: the same function for plain models and for engines ----

Step = Callable[..., None]


def a_loss_function(model: Any, _: Any, x: Tensor, y: Tensor) -> None:
    F.mse_loss(model(x)["out"], y).backward()


def several_losses(model: Any, _: Any, x: Tensor, y: Tensor) -> None:
    found = model(x)
    (F.mse_loss(found["out"], y) + 0.5 * found["hidden"].square().mean() + model(-x)["out"].mean()).backward()


def one_loss_after_the_other(model: Any, _: Any, x: Tensor, y: Tensor) -> None:
    first, second = model(x), model(-x)
    F.mse_loss(first["out"], y).backward(retain_graph=True)
    first["hidden"].square().mean().backward()
    second["out"].mean().backward()


def gradients_of_outputs(model: Any, _: Any, x: Tensor, y: Tensor) -> None:
    found = model(x)
    of_out = (found["out"].detach() - y) / len(y)
    torch.autograd.backward([found["hidden"], found["out"]], [torch.full_like(x, 0.1 / len(y)), of_out])


def a_gradient_of_the_input(model: Any, _: Any, x: Tensor, y: Tensor) -> None:
    x = x.clone().requires_grad_(True)
    out = model(x)["out"]
    [weights] = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (F.mse_loss(out, y) + (weights.sum(dim=1) * out).mean()).backward()


def several_models(model: Any, other: Any, x: Tensor, y: Tensor) -> None:
    found = model(x)
    (F.mse_loss(found["out"], y) + other(found["hidden"])["out"].mean()).backward()


SCRIPTS = (
    a_loss_function,
    several_losses,
    one_loss_after_the_other,
    gradients_of_outputs,
    a_gradient_of_the_input,
    several_models,
)


def _plain(script: Step) -> list[dict[str, Tensor]]:
    models = [TwoOutputs(1), TwoOutputs(2)]
    used = models if script is several_models else models[:1]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY) for model in used]
    for x, y in batches(STEPS):
        script(*models, x, y)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [dict(model.state_dict()) for model in used]


def _own(rank: int, world_size: int, batch: Sequence[Tensor], num_parts: int) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = (tensor.chunk(world_size)[rank].chunk(num_parts) for tensor in batch)
    yield from zip(x, y, strict=True)


def _run_scripts(rank: int, world_size: int, stage: int) -> list[list[dict[str, Tensor]]]:
    results = []
    for number, script in enumerate(SCRIPTS):
        num_parts = 1 + number % 2 if script is not several_models else 2
        engines = [
            engine_of(TwoOutputs(seed), stage, world_size, gradient_accumulation_steps=num_parts) for seed in (1, 2)
        ]
        used = engines if script is several_models else engines[:1]
        for batch in batches(STEPS):
            for x, y in _own(rank, world_size, batch, num_parts):
                script(*engines, x, y)
                for engine in used:
                    engine.step()
        assert [engine.global_steps for engine in used] == [STEPS] * len(used)
        results.append([engine.state_dict() for engine in used])
    return results


@pytest.mark.parametrize(("stage", "world_size"), PLACES)
def test_scripts_that_go_back_by_themselves(stage: int, world_size: int) -> None:
    expected = [_plain(script) for script in SCRIPTS]
    for results in run_on_ranks(world_size, _run_scripts, stage):
        for script, found, wanted in zip(SCRIPTS, results, expected, strict=True):
            for weights, plain in zip(found, wanted, strict=True):
                assert weight_distance(weights, plain) <= 2e-6, script.__name__


# ---- models of the zoo ----

MODELS = ("Recomputed", "RecomputedReentrant", "ReentrantTied", "PartlyFrozen", "Mixture", "Structured")


def _train_models(rank: int, world_size: int, stage: int, persistence: int) -> list[dict[str, Tensor]]:
    results = []
    for name in MODELS:
        zero = {"stage": stage, "stage3_param_persistence_threshold": persistence}
        engine = engine_of(build(name), stage, world_size, zero_optimization=zero)
        for batch in batches(STEPS):
            [(x, y)] = _own(rank, world_size, batch, 1)
            engine(x, y).backward()
            engine.step()
        results.append(engine.state_dict())
    return results


@pytest.mark.parametrize(("stage", "persistence"), [(0, 0), (2, 0), (3, 0), (3, 10**5)])
def test_models_that_are_recomputed_frozen_or_sparse(stage: int, persistence: int) -> None:
    for results in run_on_ranks(2, _train_models, stage, persistence):
        for name, weights in zip(MODELS, results, strict=True):
            assert weight_distance(weights, train_plain(name, STEPS)[1]) <= 2e-6, name


# ---- beside other engines ----


def _adversaries(rank: int, world_size: int, stage: int) -> list[dict[str, Tensor]]:
    networks = [engine_of(model, stage, world_size) for model in _adversarial_models()]
    _train_adversaries(networks, [engine.optimizer for engine in networks], rank, world_size)
    return [engine.state_dict() for engine in networks]


def _adversarial_models() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, size)) for size in (WIDTH, 1)]


def _train_adversaries(networks: Sequence[Any], optimizers: Sequence[Any], rank: int, world_size: int) -> None:
    generator, discriminator = networks
    for batch in batches(STEPS):
        [(x, _)] = _own(rank, world_size, batch, 1)
        fake = generator(-x)
        optimizers[1].zero_grad()
        (F.softplus(-discriminator(x)).mean() + F.softplus(discriminator(fake.detach())).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        F.softplus(-discriminator(fake)).mean().backward()
        optimizers[0].step()


@pytest.mark.parametrize("stage", STAGES)
def test_a_generator_and_a_discriminator_as_torch_has_them(stage: int) -> None:
    networks = _adversarial_models()
    optimizers = [torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=WEIGHT_DECAY) for network in networks]
    _train_adversaries(networks, optimizers, 0, 1)
    for found in run_on_ranks(2, _adversaries, stage):
        for weights, network in zip(found, networks, strict=True):
            assert weight_distance(weights, dict(network.state_dict())) <= 2e-6


# ---- what is no backward of an engine ----


def test_a_gradient_that_is_only_asked_for_is_no_backward() -> None:
    engine = engine_of(TwoOutputs(), 2, 1, gradient_accumulation_steps=4)
    plain = TwoOutputs()
    x = batches(1)[0][0].requires_grad_(True)
    for wanted in (lambda model: x, lambda model: next(model.parameters())):
        found, expected = (
            torch.autograd.grad(model(x)["out"].sum(), wanted(getattr(model, "module", model)))[0]
            for model in (engine, plain)
        )
        torch.testing.assert_close(found, expected)
    assert not engine.has_gradients
    with pytest.raises(EngineError, match="without a backward"):
        engine.step()


def test_with_a_loss_scale_the_loss_must_be_scaled() -> None:
    engine = engine_of(build("Plain"), 2, 1, fp16={"enabled": True, "initial_scale_power": 8})
    x, y = (tensor.half() for tensor in batches(1)[0])
    with pytest.raises(EngineError, match=r"call engine\.scale\(loss\)\.backward\(\)") as caught:
        engine(x, y).backward()
    assert isinstance(caught.value, RuntimeError)  # as scripts for DeepSpeed expect it
    engine.scale(engine(x, y)).backward()
    engine.step()
    assert engine.global_steps == 1


def test_a_scaled_loss_after_a_plain_one_is_refused() -> None:
    engine = engine_of(TwoOutputs(), 2, 1)
    x, _ = batches(1)[0]
    scaled = engine.scale(engine(x)["out"].mean())
    plain = engine(x)["out"].mean()  # autograd goes back through what was computed last first
    with pytest.raises(EngineError, match="scale all losses, or none"):
        torch.autograd.backward([scaled, plain])


def test_an_exception_in_the_scripts_backward_drops_its_gradients() -> None:
    engine = engine_of(TwoOutputs(), 2, 1)
    x, y = batches(1)[0]
    found = engine(x)
    handle = engine.module.lower[0].weight.register_hook(_fail)
    with pytest.raises(ArithmeticError):
        found["out"].mean().backward()
    handle.remove()
    plain = TwoOutputs()
    for model in (engine, plain):
        F.mse_loss(model(x)["out"], y).backward()
    gradient = launcher.zero.safe_get_full_grad(engine.module.lower[0].weight)
    torch.testing.assert_close(gradient, plain.lower[0].weight.grad)


def _fail(_gradient: Tensor) -> None:
    raise ArithmeticError
