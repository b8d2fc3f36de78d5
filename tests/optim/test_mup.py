"""Optimizers of µP by their names in the config: the engine trains as mup's own optimizer does."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from harness.needs import need
from harness.train.deepspeed import PEERS, available
from harness.train.zoo import WIDTH
from torch import nn

import launcher
from launcher.base.errors import ConfigError

LR = 0.01


@pytest.fixture
def mup(monkeypatch: pytest.MonkeyPatch) -> Any:
    need(available())
    monkeypatch.syspath_prepend(str(PEERS))
    return pytest.importorskip("mup")


def net(width: int = 4 * WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    first, *others = nn.Linear(WIDTH, width), nn.Linear(width, width), nn.Linear(width, width)
    return nn.Sequential(first, *(layer for other in others for layer in (nn.Tanh(), other)))


def shaped(mup: Any) -> nn.Sequential:
    model = net()
    mup.set_base_shapes(model, net(WIDTH), delta=net(2 * WIDTH))
    return model


def config(type_name: str, **zero: Any) -> dict[str, Any]:
    optimizer = {"type": type_name, "params": {"lr": LR, "weight_decay": 0.1}}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "optimizer": optimizer,
    }


@pytest.mark.parametrize("type_name", ["MuAdam", "MuAdamW", "MuSGD"])
@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 2, "cpu_offload": True}])
def test_steps_are_those_of_the_package(mup: Any, type_name: str, zero: dict[str, Any]) -> None:
    x, plain, model = torch.randn(4, WIDTH), shaped(mup), shaped(mup)
    optimizer = getattr(mup, type_name)(plain.parameters(), lr=LR, weight_decay=0.1)
    engine = launcher.initialize(model=model, config=config(type_name, **zero))[0]
    for _ in range(3):
        engine.backward(engine(x).square().mean())
        engine.step()
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
    assert engine.optimizer is not None
    assert len({group["lr"] for group in engine.optimizer.param_groups}) > 1  # by width
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    engine.destroy()


def test_a_model_without_base_shapes_is_named(mup: Any) -> None:
    with pytest.raises(ConfigError, match=r"set_base_shapes") as caught:
        launcher.initialize(model=net(), config=config("MuAdam"))
    assert caught.value.diagnostics[0].where == "optimizer.type"


def test_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mup", None)
    with pytest.raises(ConfigError, match=r"package mup, which cannot be imported.*pip install mup"):
        launcher.initialize(model=net(), config=config("MuAdamW"))
