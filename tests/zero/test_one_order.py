"""All ranks issue the same collectives in the same order, whatever their data choose, or all say where they part."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness.train.collective import communicators
from harness.train.parity import limit, weight_distance
from harness.train.ranks import run_on_ranks
from harness.train.zoo import WIDTH, Plain
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launcher.base.errors import EngineError
from launcher.zero.order import Collective, CollectiveOrder

SAMPLES, STEPS, LR = 12, 3, 0.1
# Column 0 of x is what the models choose by: 1 on rank 0 only.
MARK = 0


class Chooser(nn.Module):
    """Two experts: both where a sample has the mark, else the first one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh()) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.experts[0](x)
        has_mark = x[:, MARK] > 0
        if has_mark.any():
            hidden = hidden + self.experts[1](x) * has_mark.unsqueeze(-1)
        out: Tensor = self.down(hidden)
        return out


class RankDependentExperts(Plain):
    """One rank uses all parameters of a leaf, the others some."""

    def __init__(self) -> None:
        super().__init__()
        self.choosers = nn.ModuleList(Chooser() for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        mark = x[:, MARK : MARK + 1]
        for block, chooser in zip(self.blocks, self.choosers, strict=False):
            x = x + chooser(torch.cat([mark, block(x)[:, 1:]], dim=1))
        return super().body(x)


class NoExpert(RankDependentExperts):
    """A leaf of which ranks without the mark use nothing."""

    def __init__(self) -> None:
        super().__init__()
        for chooser in self.choosers:
            chooser.forward = lambda x, own=chooser: (  # type: ignore[method-assign]
                Chooser.forward(own, x) if bool((x[:, MARK] > 0).any()) else x * 0.0
            )


class DroppedLayers(Plain):
    """LayerDrop with reentrant checkpointing: ranks without the mark skip a block that others recompute, twice."""

    def body(self, x: Tensor) -> Tensor:
        has_mark = bool((x[:, MARK] > 0).any())
        mark = (x[:, MARK : MARK + 1] > 0).to(x.dtype)
        x = self.blocks[0](x)
        if has_mark:
            x = x + mark * checkpoint(self.blocks[1], x, use_reentrant=True)
            x = x + mark * checkpoint(self.blocks[1], x, use_reentrant=True)
        for block in self.blocks[2:]:
            x = block(x)
        return x


class RecomputedSomewhere(Plain):
    """The same blocks on every rank, and reentrant checkpointing of a repeated one on one rank only."""

    def body(self, x: Tensor) -> Tensor:
        has_mark = bool((x[:, MARK] > 0).any())
        x = self.blocks[0](x)
        for index in (1, 2, 1):
            x = checkpoint(self.blocks[index], x, use_reentrant=True) if has_mark else self.blocks[index](x)
        return x


class KeptGraphs(Plain):
    """Outputs that no loss reads, and those of a recomputation: one rank keeps their graphs, the others drop them."""

    def body(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = self.__dict__.setdefault("kept", [])
        has_mark = bool((x[:, MARK] > 0).any())

        def note(out: Tensor) -> Tensor:
            if has_mark:
                kept.append(out)
            return out

        x = self.blocks[2](self.blocks[0](x))
        note(self.blocks[2](x))
        x = self.blocks[3](x)
        return checkpoint(lambda x: note(self.blocks[1](torch.tanh(self.blocks[1](x)))), x, use_reentrant=False)


KINDS = {
    kind.__name__: kind for kind in (RankDependentExperts, NoExpert, DroppedLayers, RecomputedSomewhere, KeptGraphs)
}


def build(name: str) -> nn.Module:
    torch.manual_seed(29)
    return KINDS[name]()


def batches(world_size: int) -> list[tuple[Tensor, Tensor]]:
    """The whole batch of each step; its first part, which is rank 0's, has marks."""
    generator = torch.Generator().manual_seed(6)
    found = []
    for _ in range(STEPS):
        x = torch.randn(SAMPLES, WIDTH, generator=generator)
        x[:, MARK] = 0.0
        x[0 : SAMPLES // world_size : 2, MARK] = 1.0
        found.append((x, torch.randn(SAMPLES, generator=generator)))
    return found


def train(rank: int, world_size: int, name: str, zero: dict[str, Any], accumulation: int) -> tuple[Any, list[Any]]:
    """Return the weights and the collectives of each step."""
    import launcher

    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage3_param_persistence_threshold": 0,
            "leaf_module": {"classes": ["Chooser"] if "Expert" in name else []},
            **zero,
        },
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
    }
    engine = launcher.initialize(model=build(name), config=config)[0]
    orders = []
    for x, y in batches(world_size):
        for _ in range(accumulation):
            engine.backward(engine(x.chunk(world_size)[rank], y.chunk(world_size)[rank]))
            orders.append(copy.deepcopy(engine._sharded.reducer.order.issued))
            engine.step()
    return engine.state_dict(), orders


def train_plain(name: str, world_size: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    model = build(name).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for x, y in batches(world_size):
        optimizer.zero_grad()
        for part_x, part_y in zip(x.to(dtype).chunk(world_size), y.to(dtype).chunk(world_size), strict=True):
            (model(part_x, part_y) / world_size).backward()
        optimizer.step()
    return dict(model.state_dict())


STAGES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "2, a unit a layer": {"stage": 2, "reduce_bucket_size": 600},
    "3": {"stage": 3},
    "3, sharded after each use": {"stage": 3, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
    "3, small things whole": {"stage": 3, "stage3_param_persistence_threshold": 40},
}
# At stage 3 ranks must use the same modules.
CASES = [
    (name, stage, world_size)
    for name in KINDS
    for stage in STAGES
    for world_size in (2, 3)
    if name != "DroppedLayers" or not stage.startswith("3")
]
HARDEST = {("2, a unit a layer", 2), ("3", 2), ("3, sharded after each use", 2), ("3, sharded after each use", 3)}


@pytest.mark.parametrize(
    ("name", "stage", "world_size"),
    [pytest.param(*case, marks=[] if case[1:] in HARDEST else pytest.mark.soak) for case in CASES],
)
def test_ranks_whose_data_choose(name: str, stage: str, world_size: int) -> None:
    accumulation = 2 if world_size == 2 else 1
    expected, exact = (train_plain(name, world_size, dtype) for dtype in (torch.float32, torch.float64))
    (weights, orders), *others = run_on_ranks(world_size, train, name, STAGES[stage], accumulation)
    assert weight_distance(weights, expected) <= limit(1e-5, weight_distance(expected, exact))
    for other, other_orders in others:
        assert all(torch.equal(other[key], value) for key, value in weights.items())
        assert other_orders == orders


def _train_with_one_group(rank: int, world_size: int, name: str, stage: str) -> tuple[Any, list[Any]]:
    """Train where gathers and reductions share a communicator, through NCCL's calls: one order, or they meet others."""
    issued: list[tuple[Collective, int]] = []
    note = CollectiveOrder.note

    def noted(order: CollectiveOrder, kind: Collective, unit: int) -> None:
        issued.append((kind, unit))
        note(order, kind, unit)

    with pytest.MonkeyPatch.context() as patch, communicators("nccl"):
        patch.setenv("LAUNCH_REDUCE_GROUP", "shared")
        patch.setattr(CollectiveOrder, "note", noted)
        weights, _ = train(rank, world_size, name, STAGES[stage], accumulation=2)
    return weights, issued


@pytest.mark.parametrize("stage", ["2, a unit a layer", "3", "3, sharded after each use"])
@pytest.mark.parametrize("name", ["NoExpert", "RecomputedSomewhere", "KeptGraphs"])
def test_gathers_and_reductions_of_one_communicator_have_one_order(name: str, stage: str) -> None:
    expected = train_plain(name, 2)
    (weights, order), (others, other_order) = run_on_ranks(2, _train_with_one_group, name, stage)
    assert weight_distance(weights, expected) <= 1e-5
    assert all(torch.equal(others[key], value) for key, value in weights.items())
    assert other_order == order


def test_the_order_among_the_kinds_counts_where_they_share_a_communicator() -> None:
    for shares in (True, False):
        one, other = (CollectiveOrder(["a", "b"], shares_group=shares) for _ in range(2))
        for order, kinds in ((one, (0, 1)), (other, (1, 0))):
            for kind in kinds:
                order.note(Collective(kind), 0)
        assert (one.digests == other.digests) is not shares


def _run_out_of_data(rank: int, world_size: int, stage: int) -> dict[str, Tensor]:
    """In the last step rank 1 has no sample left: its part of the mean is 0."""
    import launcher

    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
    }
    engine = launcher.initialize(model=build("RecomputedSomewhere"), config=config)[0]
    for number, (x, y) in enumerate(batches(world_size)):
        x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
        if number < STEPS - 1 or rank == 0:
            loss = engine(x, y)
        elif stage < 3:  # the model is not run at all
            loss = torch.zeros((), requires_grad=True) * 1.0
        else:  # gathering takes every rank: any input does
            loss = engine(torch.zeros(1, WIDTH), torch.zeros(1)) * 0.0
        engine.backward(loss)
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_that_runs_out_of_data(stage: int) -> None:
    model = build("RecomputedSomewhere")
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for number, (x, y) in enumerate(batches(2)):
        optimizer.zero_grad()
        parts = list(zip(x.chunk(2), y.chunk(2), strict=True))
        for part_x, part_y in parts if number < STEPS - 1 else parts[:1]:
            (model(part_x, part_y) / 2).backward()
        optimizer.step()
    for weights in run_on_ranks(2, _run_out_of_data, stage):
        assert weight_distance(weights, dict(model.state_dict())) <= 1e-5


class _OtherWay(Plain):
    """Ranks without the mark run two blocks of one size the other way round: no backend notices."""

    def body(self, x: Tensor) -> Tensor:
        order = (0, 1, 2, 3) if bool((x[:, MARK] > 0).any()) else (0, 2, 1, 3)
        for index in order:
            x = self.blocks[index](x)
        return x


def _part(rank: int, world_size: int) -> str:
    import launcher

    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
    }
    engine = launcher.initialize(model=_OtherWay(), config=config)[0]
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    x, y = batches(world_size)[0]
    engine.backward(engine(x.chunk(world_size)[rank], y.chunk(world_size)[rank]))
    with pytest.raises(EngineError) as error:
        engine.step()
    after = engine.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items()), "the step was not taken"
    return str(error.value)


def test_ranks_that_part_are_an_error_that_names_the_unit() -> None:
    for message in run_on_ranks(2, _part):
        assert "ranks took different paths through the model since the last step: the gather of blocks.1." in message
        assert "on rank 0; the gather of blocks.2." in message
        assert "leaf_module" in message


def test_the_order_of_a_long_evaluation_is_forgotten_but_for_its_end() -> None:
    ahead, behind = CollectiveOrder(["a", "b", "c"]), CollectiveOrder(["a", "b", "c"])
    for number in range(50_001):
        ahead.note(Collective.GATHER, number % 3)
        if number < 45_000:
            behind.note(Collective.GATHER, number % 3)
    assert len(ahead.issued[Collective.GATHER]) <= 20_000
    assert ahead.difference_among(dict(enumerate((ahead._orders(), behind._orders())))) is None
    behind.note(Collective.GATHER, 2)
    difference = ahead.difference_among(dict(enumerate((ahead._orders(), behind._orders()))))
    assert difference is not None
    assert "the gather of a on rank 0; the gather of c on rank 1" in str(difference)
