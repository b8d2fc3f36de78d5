"""Every optimizer under every stage trains like the same optimizer in a plain loop on one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness.train.lamb import PlainLamb
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

import launcher
from launcher.optim import classes
from launcher.optim.classes import Lion

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, SAMPLES, WIDTH = 6, 8, 10
WORLD_SIZE = 2

# Config type -> params, and the optimizer of the plain loop.
BY_NAME: dict[str, tuple[dict[str, Any], Any]] = {
    "Adam": ({"lr": 1e-2, "weight_decay": 0.1}, lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)),
    "AdamW": ({"lr": 1e-2, "amsgrad": True}, lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0, amsgrad=True)),
    "Adagrad": ({"weight_decay": 0.1}, lambda p: torch.optim.Adagrad(p, lr=1e-2, weight_decay=0.1)),
    "SGD": (
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "Lion": ({"lr": 3e-3, "weight_decay": 0.1}, lambda p: PlainLion(p, 3e-3, (0.9, 0.999), 0.1)),
    "Lamb": (
        {"lr": 1e-2, "weight_decay": 0.1, "max_coeff": 2.0},
        lambda p: PlainLamb(p, lr=1e-2, weight_decay=0.1, most=2.0),
    ),
    "RMSprop": ({"momentum": 0.5, "centered": True}, lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True)),
    "NAdam": ({}, lambda p: torch.optim.NAdam(p)),
    "RAdam": ({"lr": 1e-2}, lambda p: torch.optim.RAdam(p, lr=1e-2)),
    "Adamax": ({}, lambda p: torch.optim.Adamax(p)),
    "ASGD": ({"t0": 2}, lambda p: torch.optim.ASGD(p, t0=2)),
    "Adadelta": ({}, lambda p: torch.optim.Adadelta(p)),
    "Rprop": ({}, lambda p: torch.optim.Rprop(p)),
}
CLIENTS: dict[str, Any] = {
    "dampened SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "Adagrad with a first sum": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "AdamW not fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=False),
    "untested": lambda p: SignDescent(p, 1e-3),
}


class PlainLion:
    """The paper's algorithm, one parameter after another."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        self.param_groups = [{"params": list(params), "lr": lr}]
        self.betas, self.weight_decay = betas, weight_decay
        self.momentum = {p: torch.zeros_like(p) for p in self.param_groups[0]["params"]}

    @torch.no_grad()
    def step(self) -> None:
        for p in self.momentum:
            if p.grad is None:
                continue
            m, lr = self.momentum[p], self.param_groups[0]["lr"]
            update = (self.betas[0] * m + (1 - self.betas[0]) * p.grad).sign()
            p.sub_(lr * (update + self.weight_decay * p))
            self.momentum[p] = self.betas[1] * m + (1 - self.betas[1]) * p.grad

    def zero_grad(self) -> None:
        for p in self.momentum:
            p.grad = None


class SignDescent(torch.optim.Optimizer):
    """Somebody's own optimizer: elementwise, with state, and a counter in its group."""

    def __init__(self, params: Any, lr: float) -> None:
        self.own_attribute = 0.5
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(self.own_attribute).add_(p.grad, alpha=1 - self.own_attribute)
                p.sub_(mean.sign(), alpha=group["lr"] / group["count"])


class WholeMatrix(torch.optim.Optimizer):
    """Looks at norms of whole parameters, as LAMB does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(dim=-1, keepdim=True).clamp(min=1e-6), alpha=group["lr"])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.mse_loss(self.head(x).squeeze(-1), y)


def make_net() -> Net:
    torch.manual_seed(3)
    return Net()


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, generator=generator))
        for _ in range(STEPS)
    ]


def settings(stage: int, world_size: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        **more,
    }


def groups_of(model: Net) -> list[dict[str, Any]]:
    """Two groups whose parameters stand side by side in one unit."""
    weights = [param for param in model.parameters() if param.dim() > 1]
    biases = [param for param in model.parameters() if param.dim() == 1]
    return [{"params": weights}, {"params": biases, "lr": 3e-3, "weight_decay": 0.0}]


def train_engine(rank: int, world_size: int, stage: int, config: dict[str, Any], client: str) -> dict[str, Tensor]:
    model = make_net()
    arguments: dict[str, Any] = {"config": settings(stage, world_size, **config)}
    if client in CLIENTS:
        arguments["optimizer"] = CLIENTS[client](model.parameters())
    elif client == "whole":
        arguments["optimizer"] = WholeMatrix(model.parameters(), 1e-2)
    elif client == "groups":
        arguments["model_parameters"] = groups_of(model)
    engine, optimizer, *_ = launcher.initialize(model=model, **arguments)
    part = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
    for step, (x, y) in enumerate(data()):
        if client == "live":
            change(optimizer.param_groups[0], step)
        engine.backward(engine(x[part], y[part]))
        engine.step()
    return engine.state_dict()


def change(group: dict[str, Any], step: int) -> None:
    """What a script may do between steps."""
    group["lr"] = 1e-2 / (1 + step)
    group["weight_decay"] = 0.1 * step
    if "betas" in group:
        group["betas"] = (0.9 - 0.1 * step, 0.99)
    else:
        group["momentum"] = 0.2 * (step % 3)


def train_plain(optimizer: Any, model: Net, live: bool = False) -> dict[str, Tensor]:
    for step, (x, y) in enumerate(data()):
        if live:
            change(optimizer.param_groups[0], step)
        model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def assert_equal(found: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for weights in found:
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=2e-5, atol=2e-6, msg=name)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", BY_NAME)
def test_by_name(name: str, stage: int) -> None:
    params, make = BY_NAME[name]
    model = make_net()
    config = {"optimizer": {"type": name, "params": params}}
    assert_equal(
        run_on_ranks(WORLD_SIZE, train_engine, stage, config, ""), train_plain(make(model.parameters()), model)
    )


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("client", CLIENTS)
def test_client_objects(client: str, stage: int) -> None:
    model = make_net()
    expected = train_plain(CLIENTS[client](model.parameters()), model)
    found = run_on_ranks(WORLD_SIZE, train_engine, stage, {"zero_allow_untested_optimizer": True}, client)
    assert_equal(found, expected)


def test_at_stage_0_an_optimizer_of_whole_parameters_sees_their_shapes() -> None:
    model = make_net()
    expected = train_plain(WholeMatrix(model.parameters(), 1e-2), model)
    assert_equal(run_on_ranks(WORLD_SIZE, train_engine, 0, {}, "whole"), expected)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "Adagrad"])
def test_groups_that_share_units(name: str, stage: int) -> None:
    model = make_net()
    kind = getattr(torch.optim, name, Lion)
    expected = train_plain(kind(groups_of(model), lr=1e-2, weight_decay=0.1), model)
    config = {"optimizer": {"type": name, "params": {"lr": 1e-2, "weight_decay": 0.1}}}
    assert_equal(run_on_ranks(WORLD_SIZE, train_engine, stage, config, "groups"), expected)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_options_written_into_the_groups_hold_from_the_next_step(name: str, stage: int) -> None:
    model = make_net()
    kind = getattr(torch.optim, name, Lion)
    options = {"momentum": 0.9} if name == "SGD" else {}
    expected = train_plain(kind(model.parameters(), lr=1e-2, **options), model, live=True)
    config = {"optimizer": {"type": name, "params": {"lr": 1e-2, **options}}}
    assert_equal(run_on_ranks(WORLD_SIZE, train_engine, stage, config, "live"), expected)


@pytest.mark.parametrize("batch_numel", [4, 2**18])
def test_lion_is_the_papers(monkeypatch: pytest.MonkeyPatch, batch_numel: int) -> None:
    """Whole and in pieces."""
    monkeypatch.setitem(classes.BATCH_NUMEL, "cpu", batch_numel)
    params = [torch.randn(7), torch.randn(3, 4), torch.randn(4, 3).t()]
    ours, plain = (copy.deepcopy(params) for _ in range(2))
    mine, theirs = Lion(ours, 0.01, (0.9, 0.98), 0.1), PlainLion(plain, 0.01, (0.9, 0.98), 0.1)
    for _ in range(5):
        for a, b in zip(ours, plain, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        theirs.step()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
