"""Stage 3, and how models read parameters and what they return: results are those of a plain loop."""

from __future__ import annotations

import copy
from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from harness.train.parity import limit, weight_distance, worst_relative
from harness.train.ranks import run_on_ranks
from harness.train.zoo import LR, SAMPLES, WEIGHT_DECAY, WIDTH, Block, Plain, batches
from torch import Tensor, nn
from torch.nn import functional as F

import launcher
from launcher.base.errors import EngineError
from launcher.zero import hooks
from launcher.zero.gathered import GatheredParameters

STEPS = 4


class Latents(nn.Module):
    """Returns a view of its parameter, as Perceiver's embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, num_samples: int) -> Tensor:
        return self.latents.expand(num_samples, -1, -1)


class ReturnedView(Plain):
    """A view of a parameter is read long after its module's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = Latents()

    def body(self, x: Tensor) -> Tensor:
        latents = self.latents(len(x))
        return super().body(x) + torch.softmax(x.unsqueeze(1) @ latents.transpose(1, 2), -1).matmul(latents).squeeze(1)


class Weight(nn.Module):
    """Returns its parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self) -> Tensor:
        return self.weight


class ReturnedParameter(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.projection = Weight()

    def body(self, x: Tensor) -> Tensor:
        return F.linear(super().body(x), self.projection())


class ObjectBlock(Block):
    """Takes and returns an object of no known kind."""

    def forward(self, state: Any) -> Any:  # type: ignore[override]  # that is the point
        return SimpleNamespace(inner=SimpleNamespace(hidden=super().forward(state.inner.hidden)))


class _State:
    __slots__ = ("states",)

    def __init__(self, *states: Tensor) -> None:
        self.states = deque(states)


class SlotsBlock(Block):
    """Takes and returns an object without a dictionary, and a queue."""

    def forward(self, state: Any) -> Any:  # type: ignore[override]
        return _State(super().forward(state.states[0]))


class Slots(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SlotsBlock() for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        state = _State(x)
        for block in self.blocks:
            state = block(state)
        found: Tensor = state.states[0]
        return found


class Objects(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ObjectBlock() for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        state = SimpleNamespace(inner=SimpleNamespace(hidden=x))
        for block in self.blocks:
            state = block(state)
        hidden: Tensor = state.inner.hidden
        return hidden


class SetBlock(Block):
    def forward(self, packed: Any) -> Any:  # type: ignore[override]
        return {super().forward(next(iter(packed)))}


class Sets(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SetBlock() for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        packed = {x}
        for block in self.blocks:
            packed = block(packed)
        return next(iter(packed))


class Gaussian(nn.Module):
    """Returns a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> torch.distributions.Normal:
        return torch.distributions.Normal(self.mean(x).squeeze(-1), F.softplus(self.spread(x)).squeeze(-1) + 0.5)


class Distribution(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head = Gaussian()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return -self.head(self.body(x)).log_prob(y).mean()


class Shapes(Plain):
    """Asks for the shape of another module's weight, as embeddings do for the longest position."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(SAMPLES, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        assert len(x) <= self.positions.weight.shape[0]
        return super().body(x) + self.positions(torch.arange(len(x)))


class DenseInputs(Plain):
    """Each block reads the outputs of all blocks before it."""

    def body(self, x: Tensor) -> Tensor:
        seen = [x]
        for block in self.blocks:
            seen.append(block(torch.stack(seen).mean(0)))
        return torch.stack(seen).sum(0)


class Squared(Plain):
    """A penalty on weights that the forward reads."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + 0.1 * sum(block.up.weight.pow(2).sum() for block in self.blocks)


KINDS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (ReturnedView, ReturnedParameter, Objects, Slots, Sets, Distribution, Shapes, DenseInputs, Squared)
}


def build(name: str) -> nn.Module:
    torch.manual_seed(31)
    return KINDS[name]()


def engine_of(model: nn.Module, world_size: int, **zero: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "gradient_clipping": 0.0,
        "steps_per_print": 0,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            **zero,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
    }
    return launcher.initialize(model=model, config=config)[0]


def train(rank: int, world_size: int, name: str, zero: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(build(name), world_size, **zero)
    losses = []
    for x, y in batches(STEPS):
        loss = engine(*part_of(name, rank, world_size, x, y))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine.state_dict()


def part_of(name: str, rank: int, world_size: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if name == "Shapes":  # what depends on the position sees the whole batch
        return x, y
    return x.chunk(world_size)[rank], y.chunk(world_size)[rank]


def plain(name: str, dtype: torch.dtype = torch.float32) -> tuple[list[float], dict[str, Tensor]]:
    model = build(name).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    losses = []
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        loss = model(x.to(dtype), y.to(dtype))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


@pytest.mark.parametrize("prefetch", [0, 50_000_000])
@pytest.mark.parametrize("name", KINDS)
def test_models_train_as_in_a_plain_loop(name: str, prefetch: int) -> None:
    (expected, expected_weights), (exact, exact_weights) = plain(name), plain(name, torch.float64)
    found = run_on_ranks(2, train, name, {"stage3_prefetch_bucket_size": prefetch})
    losses = torch.tensor([own for own, _ in found]).mean(dim=0).tolist()
    assert worst_relative(losses, expected) <= limit(1e-6, worst_relative(expected, exact))
    most = limit(2e-6, weight_distance(expected_weights, exact_weights))
    for _, weights in found:
        assert weight_distance(weights, expected_weights) <= most


class TwoTowers(nn.Module):
    """Users call methods of it other than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Shapes(), Plain()

    def features(self, x: Tensor) -> Tensor:
        return self.left.body(x)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.left(x, y) + self.right(x, y)


class Tower(Shapes):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        features = self.body(x)
        return features if y is None else F.mse_loss(self.head(features).squeeze(-1), y)


class Towers(TwoTowers):
    def __init__(self) -> None:
        super().__init__()
        self.left = Tower()

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.left(x)
        return out


def _call_a_method(rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    model = Towers()
    x, _ = batches(1)[0]
    expected = model.features(x).detach()
    engine = engine_of(model, world_size)
    with torch.no_grad():
        untrained = engine.features(x)
    loss = engine.features(x).pow(2).mean()
    engine.backward(loss)
    engine.step()
    with torch.no_grad():
        return expected, untrained, engine.features(x)


def test_methods_other_than_forward_find_their_parameters() -> None:
    for expected, untrained, trained in run_on_ranks(2, _call_a_method):
        assert torch.allclose(untrained, expected, rtol=1e-6)
        assert trained.pow(2).mean() < expected.pow(2).mean()


class RootReturnsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.linear(x), "weight": self.weight, "part": self.weight[:4]}


def _return_from_the_root(rank: int, world_size: int) -> tuple[Any, Any]:
    torch.manual_seed(2)
    model = RootReturnsParameter()
    expected = {name: value.detach().clone() for name, value in model(batches(1)[0][0]).items()}
    engine = engine_of(model, world_size)
    found = engine(batches(1)[0][0])
    loss = found["out"].pow(2).mean() + found["weight"].pow(2).sum() + found["part"].sum()
    engine.backward(loss)
    gradient = launcher.zero.safe_get_full_grad(model.weight)
    expected_gradient = 2 * expected["weight"] + torch.tensor([1.0] * 4 + [0.0] * (WIDTH - 4))
    assert gradient is not None
    assert torch.allclose(gradient, expected_gradient)
    return expected, {name: value.detach() for name, value in found.items()}


def test_a_model_may_return_its_parameters() -> None:
    for expected, found in run_on_ranks(2, _return_from_the_root):
        assert all(torch.allclose(found[name], value, rtol=1e-6) for name, value in expected.items())


def _penalize_shards(rank: int, world_size: int) -> None:
    model = Plain()
    engine = engine_of(model, world_size)
    x, y = batches(1)[0]
    loss = engine(x, y) + sum(param.pow(2).sum() for param in model.parameters())
    with pytest.raises(EngineError, match="read while it was sharded"):
        engine.backward(loss)


def test_a_penalty_on_shards_is_one_clear_error() -> None:
    run_on_ranks(2, _penalize_shards)


class Penalized(Plain):
    """A penalty on the gradient by the input: its gradient is one of a gradient."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.head(self.body(x)).squeeze(-1)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + grad.pow(2).mean()


class Transformed(Plain):
    """Runs a block within a transform of torch.func."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) + torch.func.grad(lambda inner: self.blocks[0](inner).pow(2).sum())(x)


class Vectorized(Plain):
    def body(self, x: Tensor) -> Tensor:
        return super().body(x) + torch.func.vmap(self.blocks[0])(x)


class _IteratorBlock(Block):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return iter([super().forward(x)])


class Iterators(Plain):
    """Blocks that return what no tensor is found in."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_IteratorBlock() for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = next(block(x))
        return x


def _read_what_is_not_gathered(rank: int, world_size: int, kind: type[nn.Module], message: str) -> None:
    engine = engine_of(kind(), world_size)
    with pytest.raises(EngineError, match=message):
        engine.backward(engine(*batches(1)[0]))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Penalized, "a gradient of a gradient"),
        (Iterators, "an output that no tensor is found in, such as an iterator"),
        (Transformed, "a forward of Block, which reads blocks.0.scale .* torch.func"),
        (Vectorized, "a forward of Block, which reads blocks.0.scale .* torch.func"),
    ],
)
def test_what_stage_3_cannot_gather_is_one_clear_error(kind: type[nn.Module], message: str) -> None:
    run_on_ranks(2, _read_what_is_not_gathered, kind, message)


def _copy_and_save(rank: int, world_size: int) -> tuple[float, int]:
    """Copy a model outside of a block, which is an error, and within; save its shards, which is a warning, once."""
    engine = engine_of(build("Objects"), world_size)
    x, y = batches(1)[0]
    with pytest.raises(EngineError, match=r"scale is a shard: a copy .*GatheredParameters"):
        copy.deepcopy(engine.module)
    with GatheredParameters(engine.module.parameters()):
        twin = copy.deepcopy(engine.module)
        hooks._warn_once.cache_clear()
        with mock.patch.object(hooks, "get_logger") as logger:
            engine.module.state_dict()
            engine.state_dict()
            twin.state_dict()
            assert not logger.return_value.warning.called
    with mock.patch.object(hooks, "get_logger") as logger:
        engine.module.state_dict()
        engine.module.state_dict()
    return (engine(x, y) - twin(x, y)).abs().item(), logger.return_value.warning.call_count


def test_a_copy_of_shards_is_an_error_and_a_state_dict_of_them_a_warning() -> None:
    assert run_on_ranks(2, _copy_and_save) == [(0.0, 1), (0.0, 0)]
