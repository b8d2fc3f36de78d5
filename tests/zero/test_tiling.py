"""Layers in tiles compute what they computed whole, keep their names, and need less whole at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness.logs import logged
from harness.train.ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from launcher.base.errors import EngineError
from launcher.zero import TiledLinear, register_external_parameter, set_z3_leaf_module, tile_large_layers

# ---- TiledLinear ----


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("in_splits", "out_splits"), [(1, 1), (1, 3), (4, 1), (3, 5)])
def test_a_tiled_layer_is_a_linear_layer(in_splits: int, out_splits: int, bias: bool) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(10, 13, bias=bias)
    tiled = TiledLinear(10, 13, bias, in_splits, out_splits, init_linear=whole)
    x, twin = (torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    out, expected = tiled(x), whole(twin)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
    grads = [torch.cat([tile.weight.grad for tile in row], dim=1) for row in tiled.linears]
    torch.testing.assert_close(torch.cat(grads), whole.weight.grad)


def test_parts_go_in_and_come_out() -> None:
    tiled = TiledLinear(6, 4, in_splits=3, out_splits=2, input_is_already_split=True, combine_out_splits=False)
    parts = torch.ones(5, 6).split(2, dim=-1)
    assert [out.shape for out in tiled(parts)] == [(5, 2), (5, 2)]
    with pytest.raises(EngineError, match="forward got one tensor; give its parts"):
        tiled(torch.ones(5, 6))
    with pytest.raises(EngineError, match=r"parts have \[2, 2\] features; they must have \[2, 2, 2\]"):
        tiled(parts[:2])


def test_what_cannot_be_tiled_is_refused() -> None:
    with pytest.raises(EngineError, match="in_splits is 7, in_features 6; give 1 to 6 splits"):
        TiledLinear(6, 4, in_splits=7)
    with pytest.raises(
        EngineError, match=r"weight of shape \(4, 5\) with bias; the layer must have \(4, 6\) and a bias"
    ):
        TiledLinear(6, 4).copy_params_from(nn.Linear(5, 4))


def test_tiles_are_of_the_class_one_asks_for() -> None:
    class Scaled(nn.Linear):
        def __init__(self, in_features: int, out_features: int, bias: bool, scale: float) -> None:
            super().__init__(in_features, out_features, bias)
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    plain = nn.Linear(4, 4, bias=False)
    tiled = TiledLinear(4, 4, False, 2, 2, linear_cls=Scaled, init_linear=plain, scale=3.0)
    torch.testing.assert_close(tiled(torch.ones(1, 4)), 3 * plain(torch.ones(1, 4)))


# ---- layers of a model that exists ----

VOCABULARY, HIDDEN = 640, 24


class Model(nn.Module):
    """A large embedding, a large head, small blocks; on request one weight for both."""

    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=3)
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, dims=-1).flatten())


def build(is_tied: bool = False) -> Model:
    torch.manual_seed(6)
    return Model(is_tied)


TOKENS = torch.arange(24).reshape(4, 6) * 7 % VOCABULARY


def test_a_tiled_model_computes_the_same_and_keeps_its_names() -> None:
    plain, model = build(), build()
    layers = tile_large_layers(model, 5000)
    assert {layer.name: len(layer.tiles) for layer in layers} == {"embedding.weight": 4, "head.weight": 4}
    assert all(tile.numel() <= 5000 for layer in layers for tile in layer.tiles)
    assert isinstance(model.head, nn.Linear)
    assert isinstance(model.embedding, nn.Embedding)
    assert set(model.state_dict()) == set(plain.state_dict())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in plain.state_dict().items())
    losses = [module(TOKENS) for module in (plain, model)]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    tiles = [torch.cat([tile.grad for tile in layer.tiles], dim) for layer, dim in zip(layers, (1, 0), strict=True)]
    torch.testing.assert_close(tiles, [plain.embedding.weight.grad, plain.head.weight.grad])
    assert not tiles[0][3].any()  # the padding's row
    assert torch.equal(copy.deepcopy(model)(TOKENS), losses[1])


def test_a_state_dict_goes_in_whole() -> None:
    model, other = build(), Model()
    tile_large_layers(model, 5000)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(TOKENS), other(TOKENS))
    assert torch.equal(model.head.weight, other.head.weight)
    state = other.state_dict()
    state["head.weight"] = torch.ones(3, HIDDEN)
    with pytest.raises(RuntimeError, match=r"size mismatch for head.weight: it has shape \(3, 24\)"):
        model.load_state_dict(state)
    assert model.load_state_dict({}, strict=False).missing_keys


def test_the_whole_weight_can_be_read() -> None:
    model = build()
    tile_large_layers(model, 5000)
    F.linear(torch.ones(1, HIDDEN), model.head.weight).sum().backward()
    assert all(tile.weight.grad is not None for tile in model.head.tiles)


class _Own(nn.Linear):
    pass


def test_what_stays_whole_says_why() -> None:
    def reason(model: nn.Module) -> str:
        (layer,) = tile_large_layers(model, 1000)
        assert layer.tiles == ()
        return layer.reason

    tied = build(is_tied=True)
    assert reason(tied) == "shared with head.weight"
    assert tied.head.weight is tied.embedding.weight
    assert reason(nn.ModuleList([_Own(40, 40)])) == "weight of a _Own, no plain Linear or Embedding"
    assert reason(nn.Embedding(200, 10, max_norm=1.0)) == "its max_norm looks at whole rows"
    leaf = nn.Sequential(nn.Linear(40, 40))
    set_z3_leaf_module(leaf, True)
    assert reason(leaf) == "within a leaf module"
    pair = nn.Sequential(nn.Linear(40, 40), nn.Tanh())
    register_external_parameter(pair[1], pair[0].weight)
    assert reason(pair) == "read by another module"


# ---- under the engine ----

WIDE = 4096  # the head has 2 million elements, eight times the smallest tile


class Wide(nn.Module):
    def __init__(self, num_tiles: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))
        head = nn.Linear(512, WIDE)
        self.head = head if num_tiles == 1 else TiledLinear(512, WIDE, out_splits=num_tiles, init_linear=head)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


def train(rank: int, world_size: int, max_live: int, how: str) -> dict[str, Any]:
    """Train at stage 3. how: "plain", "tiles" (a TiledLinear), "groups", "client" or "Init" (where parameters are)."""
    import contextlib

    import launcher

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 0,
        "zero_optimization": {"stage": 3, "stage3_max_live_parameters": max_live, "stage3_max_reuse_distance": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    with launcher.zero.Init(config=config) if "Init" in how else contextlib.nullcontext():
        torch.manual_seed(8)
        model = Wide(8 if "tiles" in how else 1)
    options: dict[str, Any] = {"model": model, "config": config}
    if how == "groups":
        options["model_parameters"] = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    if how == "client":
        options["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    engine = launcher.initialize(**options)[0]
    buffers, schedule, losses = engine._sharded.units[0].group.buffers, engine._sharded.schedule, []
    buffers.peak_bytes = buffers.lent_bytes
    for step in range(4):
        schedule.peak_live_numel = 0
        loss = engine(torch.full((2, 512), 0.1 * (step + rank + 1)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    state = engine.state_dict()
    engine.load_state_dict({name: torch.full_like(value, 0.5) for name, value in state.items()})
    is_loaded = all(torch.all(value == 0.5) for value in engine.state_dict().values())
    return {
        "losses": losses,
        "live": schedule.peak_live_numel,
        "peak_bytes": buffers.peak_bytes,
        "state": {name: value.shape for name, value in state.items()},
        "is_loaded": is_loaded,
    }


PLENTY, FEW = 10**9, 2**20


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    found: dict[str, Any] = run_on_ranks(2, train, PLENTY, "plain")[0]
    return found


@pytest.mark.parametrize("how", ["plain", "groups", "client", "Init"])
def test_a_layer_over_the_bound_is_tiled(whole: dict[str, Any], how: str) -> None:
    found = run_on_ranks(2, train, FEW, how)[0]
    assert found["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert found["state"] == whole["state"]
    assert found["is_loaded"]
    # The figures of docs/activation.md.
    assert (whole["live"], whole["peak_bytes"]) == (2_621_440, 16_797_696)
    assert (found["live"], found["peak_bytes"]) == (FEW, 12_582_912)


@pytest.mark.parametrize("how", ["tiles", "tiles and Init"])
def test_tiles_of_a_tiled_linear_are_fetched_one_by_one(whole: dict[str, Any], how: str) -> None:
    found = run_on_ranks(2, train, FEW, how)[0]
    assert found["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert (found["live"], found["peak_bytes"]) == (FEW, 8_409_088)
    assert "head.linears.7.0.weight" in found["state"]


def _announced(rank: int, world_size: int) -> list[str]:
    import launcher

    zero = {"stage": 3, "stage3_max_live_parameters": FEW}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    tied = Wide()
    tied.twin = nn.Linear(512, WIDE)
    tied.twin.weight = tied.head.weight
    with logged() as lines:
        launcher.initialize(model=Wide(), config=config)
        launcher.initialize(model=tied, config=config)
    return [line for line in lines if "head.weight" in line]


def test_what_was_tiled_is_said_once() -> None:
    first, others = run_on_ranks(2, _announced)
    why = "stage3_max_live_parameters is 1,048,576"
    assert first == [
        f"tiled: head.weight, 2,097,152 elements, in 4 parts; {why}",
        f"note: head.weight has 2,097,152 elements and stays unsharded (shared with twin.weight); {why}",
    ]
    assert others == []
