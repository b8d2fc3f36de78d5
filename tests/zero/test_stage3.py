"""Stage 3: models of every shape train as plain torch does, and parameters are shards when nobody needs them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from harness.train.parity import limit, weight_distance, worst_relative
from harness.train.ranks import run_on_ranks
from harness.train.zoo import LR, MODELS, SAMPLES, WEIGHT_DECAY, batches, build, train_plain
from torch import Tensor, nn

STEPS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "sharded after each use": {"stage3_max_reuse_distance": 0},
    "kept while near": {},
    "no fetching ahead": {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
    "small things whole": {"stage3_param_persistence_threshold": 100},
}


def config(world_size: int, zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        **more,
    }


def train(
    rank: int, world_size: int, name: str, zero: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    """Train through the engine; return the mean losses, the final whole weights and the collectives of each step."""
    import torch.distributed as dist

    import launcher

    engine = launcher.initialize(model=build(name), config=config(world_size, zero))[0]
    part = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
    losses, orders = [], []
    for x, y in batches(STEPS):
        loss = engine(x[part], y[part])
        engine.backward(loss)
        orders.append(copy.deepcopy(engine._sharded.reducer.order.issued))
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
        for unit in engine._sharded.units:
            assert not unit.is_sharded or all(param.numel() == 0 for param in unit.members.params)
    return losses, engine.state_dict(), orders


HARDEST = "sharded after each use"
# Models that use a unit more than once, or not at all, under the settings that keep and fetch ahead.
SHORT = {(name, HARDEST) for name in MODELS} | {
    (name, setting) for name in ("Repeated", "AlternatingPath", "PartlyFrozen") for setting in SETTINGS
}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        pytest.param(name, setting, marks=[] if (name, setting) in SHORT else pytest.mark.soak)
        for name in MODELS
        for setting in SETTINGS
    ],
)
def test_every_model_trains_as_plain_torch_does(name: str, setting: str) -> None:
    zero = dict(SETTINGS[setting])
    if name == "Mixture":
        zero["leaf_module"] = {"classes": ["Experts"]}
    (losses, weights, orders), *others = run_on_ranks(2, train, name, zero)
    expected_losses, expected_weights = train_plain(name, STEPS)
    exact_losses, exact_weights = train_plain(name, STEPS, dtype=torch.float64)
    assert worst_relative(losses, expected_losses) <= limit(1e-6, worst_relative(expected_losses, exact_losses))
    assert weight_distance(weights, expected_weights) <= limit(2e-6, weight_distance(expected_weights, exact_weights))
    for _, other, other_orders in others:
        assert all(torch.equal(other[key], value) for key, value in weights.items())
        assert all(orders)
        assert other_orders == orders


# ---- what happens around training ----


def engine_of(name: str, zero: dict[str, Any] | None = None, **more: Any) -> Any:
    import launcher

    settings = {"stage3_max_reuse_distance": 0, **(zero or {})}
    return launcher.initialize(model=build(name), config=config(2, settings, **more))[0]


def my_part(rank: int, tensor: Tensor) -> Tensor:
    return tensor[rank * SAMPLES // 2 : (rank + 1) * SAMPLES // 2]


def _evaluate(rank: int, world_size: int) -> dict[str, Any]:
    engine = engine_of("Plain")
    reference = build("Plain")
    x, y = batches(1)[0]
    engine.eval()
    with torch.no_grad():
        before = [engine(x, y).item() for _ in range(3)]
    shards = all(param.numel() == 0 for param in engine.module.parameters())
    engine.train()
    loss = engine(my_part(rank, x), my_part(rank, y))
    engine.eval()
    with torch.no_grad():
        between = engine(x, y).item()  # between a forward and its backward
    engine.train()
    engine.backward(loss)
    engine.step()
    with torch.no_grad():
        after = engine(x, y).item()
    return {
        "before": before,
        "between": between,
        "after": after,
        "expected": reference(x, y).item(),
        "shards": shards,
        "live": engine._sharded.schedule.live_numel,
    }


def test_evaluation_before_between_and_after_training() -> None:
    for found in run_on_ranks(2, _evaluate):
        assert found["before"] == pytest.approx([found["expected"]] * 3, rel=1e-6)
        assert found["between"] == pytest.approx(found["expected"], rel=1e-6)
        assert found["after"] < found["expected"]
        assert found["shards"]
        assert found["live"] == 0


class _FailingBlock(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        if self.fails:
            raise ValueError("in the middle of a forward")
        return out


def _fail_in_forward(rank: int, world_size: int) -> tuple[list[float], int]:
    import launcher

    model = build("Plain")
    failing = _FailingBlock(model.blocks[2])
    model.blocks[2] = failing
    engine = launcher.initialize(model=model, config=config(2, {}))[0]
    losses = []
    for number, (x, y) in enumerate(batches(4)):
        failing.fails = number == 1
        try:
            loss = engine(my_part(rank, x), my_part(rank, y))
        except ValueError:
            continue
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, engine._sharded.schedule.live_numel


def test_a_forward_that_raises_can_be_left_out() -> None:
    for losses, live_numel in run_on_ranks(2, _fail_in_forward):
        assert len(losses) == 3
        assert live_numel == 0


def _two_engines(rank: int, world_size: int) -> list[float]:
    first, second = engine_of("Plain"), engine_of("Containers")
    losses = []
    for x, y in batches(3):
        part = my_part(rank, x), my_part(rank, y)
        for engine in (first, second):
            loss = engine(*part)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def test_several_engines_in_one_process() -> None:
    mean = torch.tensor(run_on_ranks(2, _two_engines)).mean(dim=0).tolist()
    expected = [
        value
        for pair in zip(train_plain("Plain", 3)[0], train_plain("Containers", 3)[0], strict=True)
        for value in pair
    ]
    assert mean == pytest.approx(expected, rel=1e-6)


def _accumulate(rank: int, world_size: int) -> tuple[int, int, list[int]]:
    """Return the live elements at the peak of the first and of later steps, and the sizes of all units."""
    engine = engine_of("Plain", {"stage3_prefetch_bucket_size": 1100}, gradient_accumulation_steps=2)
    schedule = engine._sharded.schedule
    peaks = []
    for x, y in batches(6):
        schedule.peak_live_numel = 0
        engine.backward(engine(my_part(rank, x), my_part(rank, y)))
        engine.step()
        peaks.append(schedule.peak_live_numel)
    return peaks[0], max(peaks[1:]), sorted(unit.numel for unit in engine._sharded.units)


def test_no_more_is_whole_than_what_is_used_and_what_is_next() -> None:
    for first, later, (head, *blocks) in run_on_ranks(2, _accumulate):
        assert len(set(blocks)) == 1
        assert first <= blocks[0]
        assert blocks[0] < later <= 2 * blocks[0] + head


def _keep(rank: int, world_size: int, max_live: int) -> tuple[int, list[int]]:
    """Train with units that are all used again soon; return the live elements at the peak, and the units' sizes."""
    near = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 10**9}
    engine = engine_of("Plain", {**near, "stage3_max_live_parameters": max_live})
    for x, y in batches(3):
        engine.backward(engine(my_part(rank, x), my_part(rank, y)))
        engine.step()
    return engine._sharded.schedule.peak_live_numel, [unit.numel for unit in engine._sharded.units]


def test_units_are_kept_up_to_the_live_parameters_allowed() -> None:
    a_block = sum(param.numel() for param in build("Plain").blocks[0].parameters())
    for max_live, num_kept in ((a_block, 0), (2500, 2), (10**9, 4)):
        for peak, (*blocks, head) in run_on_ranks(2, _keep, max_live):
            assert len(set(blocks)) == 1
            assert peak <= max(max_live, 0) + blocks[0] or num_kept == 4
            assert num_kept * blocks[0] <= peak <= (num_kept + 1) * blocks[0] + head


def _change_path(rank: int, world_size: int) -> list[int]:
    engine = engine_of("AlternatingPath")
    counts = []
    for x, y in batches(4):
        engine.backward(engine(my_part(rank, x), my_part(rank, y)))
        engine.step()
        counts.append(engine._sharded.schedule.num_path_changes)
    return counts


def test_another_path_is_noticed_and_recorded_anew() -> None:
    for counts in run_on_ranks(2, _change_path):
        assert counts == [0, 1, 2, 3]


def _load(rank: int, world_size: int) -> bool:
    engine = engine_of("Tied")
    state = {name: torch.full_like(value, 0.25) for name, value in engine.state_dict().items()}
    engine.load_state_dict(state)
    return all(torch.equal(value, state[name]) for name, value in engine.state_dict().items())


def test_state_dicts_are_whole() -> None:
    assert all(run_on_ranks(2, _load))


def _infer(rank: int, world_size: int) -> dict[str, Any]:
    import launcher
    from launcher.base.errors import EngineError

    settings = {key: value for key, value in config(2, {}).items() if key != "optimizer"}
    engine, optimizer, _, _ = launcher.initialize(model=build("Plain"), config=settings)
    engine.eval()
    x, y = batches(1)[0]
    with torch.no_grad():
        loss = engine(x, y)
    try:
        engine.backward(engine(x, y))
        refusal = ""
    except EngineError as error:
        refusal = str(error)
    return {
        "optimizer": optimizer,
        "shards": all(param.numel() == 0 for param in engine.module.parameters()),
        "loss": loss.item(),
        "refusal": refusal,
        "lr": engine.get_lr(),
    }


def test_inference_without_an_optimizer() -> None:
    x, y = batches(1)[0]
    for found in run_on_ranks(2, _infer):
        assert found["optimizer"] is None
        assert found["shards"]
        assert found["loss"] == pytest.approx(build("Plain")(x, y).item(), rel=1e-6)
        assert "inference only" in found["refusal"]
        assert found["lr"] == []


def _generate(rank: int, world_size: int) -> tuple[int, int]:
    """Run forwards until this rank's own loop is done; return how many it wanted and how many it ran."""
    engine = engine_of("Plain")
    engine.eval()
    x, y = batches(1)[0]
    wanted, ran = 2 + 3 * rank, 0
    with torch.no_grad():
        while engine.any_rank(ran < wanted):
            engine(x, y)
            ran += 1
    return wanted, ran


def test_loops_of_unequal_length() -> None:
    assert run_on_ranks(2, _generate) == [(2, 5), (5, 5)]


def _copy(rank: int, world_size: int) -> bool:
    import copy

    engine = engine_of("Plain", {"stage": 2})
    twin = copy.deepcopy(engine.module)
    x, y = batches(1)[0]
    before = twin(x, y).item()
    engine.backward(engine(my_part(rank, x), my_part(rank, y)))
    engine.step()
    return type(twin.head._parameters) is dict and twin(x, y).item() == before


def test_a_copy_of_a_model_belongs_to_no_engine() -> None:
    assert all(run_on_ranks(2, _copy))
