"""Flat shards: parameters that sit out steps, states that travel, optimizers that are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness.logs import logged
from harness.train.shards import full_shard, shards_of_unit
from torch import Tensor, nn

import launcher
from launcher.base.errors import EngineError
from launcher.comm.buffers import BufferPool
from launcher.kernels.reference import ReferenceKernel
from launcher.optim.api import FlatOptimizer, ParamShard
from launcher.optim.catalog import ELEMENTWISE
from launcher.optim.factory import OptimizerBackend, OptimizerPlan, ZeroRules, plan_from_client, plan_from_config

SIZES = (6, 1, 9, 4)
OFFSETS = (0, 6, 7, 16, 20)
OPTIONS = {"SGD": {"momentum": 0.9, "weight_decay": 0.1}, "Lion": {"weight_decay": 0.1}, "AdamW": {"weight_decay": 0.1}}
# Which of the four parameters have a gradient in each step.
USED = [{0, 1, 2, 3}, {0, 2}, {0, 1, 2, 3}, {2, 3}, {0, 1, 2, 3}]
USED_LATE = [{0, 2}, {0, 2}, {0, 1, 2}, {1}, {0, 1, 2, 3}]


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


MakeFlat = Callable[[str, list[ParamShard]], FlatOptimizer]


@pytest.fixture(params=["torch", "kernel"])
def make_flat(request: pytest.FixtureRequest) -> MakeFlat:
    backend = OptimizerBackend(
        {"cpu": ReferenceKernel()} if request.param == "kernel" else {}, BufferPool(torch.device("cpu"))
    )

    def make(name: str, shards: list[ParamShard]) -> FlatOptimizer:
        return plan_from_config(name, OPTIONS.get(name, {}), nn.Linear(1, 1), None).build(shards, backend)

    return make


def make_shards(owned: range = range(OFFSETS[-1])) -> list[ParamShard]:
    return shards_of_unit(values(0), owned, unit=3)


def halves() -> list[list[ParamShard]]:
    """What two ranks own, cut in the middle of a parameter."""
    return [make_shards(range(10)), make_shards(range(10, 20))]


def take(flat: FlatOptimizer, step: int, used: set[int]) -> None:
    for shard, grad in zip(flat.shards, values(step + 1), strict=True):
        shard.grad.copy_(grad[shard.owned.start : shard.owned.stop])
    flat.step(unused={f"p{index}" for index in range(4) if index not in used})


def masters(*ranks: FlatOptimizer) -> Tensor:
    """The values of all parameters, in their order, of which each rank has a part."""
    return torch.cat(
        [torch.cat([shard.master for shard in shards]) for shards in zip(*(r.shards for r in ranks), strict=True)]
    )


@pytest.mark.parametrize("schedule", [USED, USED_LATE], ids=["pauses", "joins late"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_parameter_without_gradient_is_skipped_as_torch_skips_it(
    name: str, schedule: list[set[int]], make_flat: MakeFlat
) -> None:
    ranks = [make_flat(name, shards) for shards in halves()]
    params = values(0)
    kind = ELEMENTWISE["AdamW" if name == "Adam" else name]
    lr = ranks[0].param_groups[0]["lr"]
    defaults = {"lr": lr, "weight_decay": 0.0} if name in ("Adam", "AdamW") else {}
    plain = kind(params, **{"lr": lr, **defaults, **OPTIONS.get(name, {})})  # type: ignore[call-arg]
    for step, used in enumerate(schedule):
        for flat in ranks:
            take(flat, step, used)
        for index, (param, grad) in enumerate(zip(params, values(step + 1), strict=True)):
            param.grad = grad if index in used else None
        plain.step()
        torch.testing.assert_close(masters(*ranks), torch.cat(params), rtol=1e-5, atol=1e-6)


def test_each_parameter_counts_its_own_steps(make_flat: MakeFlat) -> None:
    flat = make_flat("AdamW", make_shards(range(10)))
    take(flat, 0, {0, 1, 2, 3})
    take(flat, 1, {0, 2, 3})
    assert [int(shard.state["step"]) for shard in flat.shards if shard.owned] == [2, 1, 2]
    assert flat.state_numel() == 2 * 10


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_state_continues_where_it_was(name: str, make_flat: MakeFlat) -> None:
    flat = make_flat(name, make_shards())
    for step in range(3):
        take(flat, step, USED[step])
    flat.param_groups[0]["lr"] *= 0.5
    other = make_flat(name, make_shards())
    take(other, 9, {0, 1})  # state that must be forgotten
    for old, new in zip(flat.shards, other.shards, strict=True):
        new.master.copy_(old.master)
    other.load_state_dict(copy.deepcopy(flat.state_dict()))
    assert other.param_groups[0]["lr"] == flat.param_groups[0]["lr"]
    for step in range(3, 5):
        take(flat, step, USED[step])
        take(other, step, USED[step])
    assert torch.equal(masters(flat), masters(other))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_state_is_cut_and_joined_for_other_ranges(name: str, make_flat: MakeFlat) -> None:
    """From one rank to two, and from two to one with the pieces of both."""
    one = make_flat(name, make_shards())
    two = [make_flat(name, shards) for shards in halves()]
    for flat in (one, *two):
        for step in range(3):
            take(flat, step, USED[step])
    states = [flat.state_dict() for flat in two]
    pieces = {
        key: [piece for state in states for piece in state["states"].get(key, ())] for key in ("p0", "p1", "p2", "p3")
    }
    joined, cut = make_flat(name, make_shards()), [make_flat(name, shards) for shards in halves()]
    joined.load_state_dict({**states[0], "states": pieces})
    for flat in cut:
        flat.load_state_dict(one.state_dict())
    for old, new in ((one, joined), *zip(two, cut, strict=True)):
        for old_shard, new_shard in zip(old.shards, new.shards, strict=True):
            new_shard.master.copy_(old_shard.master)
    for flat in (one, joined, *cut):
        for step in range(3, 5):
            take(flat, step, USED[step])
    assert torch.equal(masters(joined), masters(one))
    assert torch.equal(masters(*cut), masters(one))


def test_a_state_without_some_elements_is_refused_and_nothing_is_overwritten(make_flat: MakeFlat) -> None:
    half, full = make_flat("AdamW", halves()[0]), make_flat("AdamW", make_shards())
    for flat in (half, full):
        take(flat, 0, {0, 1, 2, 3})
    half.param_groups[0]["lr"] = 7.0
    before = copy.deepcopy(full.state_dict())
    with pytest.raises(EngineError, match="nothing of elements 3 to 9 of p2"):
        full.load_state_dict(half.state_dict())
    assert full.param_groups[0]["lr"] != 7.0
    for name, [piece] in full.state_dict()["states"].items():
        assert torch.equal(piece["state"]["exp_avg"], before["states"][name][0]["state"]["exp_avg"])


def test_the_state_of_another_optimizer_is_refused(make_flat: MakeFlat) -> None:
    state = make_flat("SGD", make_shards()).state_dict()
    with pytest.raises(EngineError, match="SGD with 1 groups, this run has AdamW with 1 groups"):
        make_flat("AdamW", make_shards()).load_state_dict(state)


def test_a_rank_may_own_nothing_of_a_group() -> None:
    for name in ELEMENTWISE:
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        plan = plan_from_config(name, {}, model, groups)
        shard = full_shard(torch.ones(4), group=1)
        shard.grad.fill_(1.0)
        plan.build([shard], OptimizerBackend({}, BufferPool(torch.device("cpu")))).step()
        assert not torch.equal(shard.master, torch.ones(4))


# ---- what may be sharded ----


class Homemade(torch.optim.SGD):
    """A subclass may do anything."""


class Lamb(torch.optim.SGD):
    """A class whose name says that it needs whole parameters."""


class Muon(torch.optim.SGD):
    """A Muon of somebody else's."""


def plan(kind: Any, stage: int, allow_untested: bool = False) -> OptimizerPlan:
    model = nn.Linear(3, 3, bias=False)
    return plan_from_client(lambda p: kind(p), model, None, ZeroRules(stage, allow_untested))


def test_untested_optimizers_need_the_key() -> None:
    with pytest.raises(EngineError, match="untested with ZeRO stage 1") as caught:
        plan(Homemade, 1)
    assert '"zero_allow_untested_optimizer": true' in str(caught.value.diagnostics[0].hint)
    assert plan(Homemade, 2, allow_untested=True).notice is not None
    assert plan(Homemade, 0).notice is None


@pytest.mark.parametrize("kind", [Lamb, Muon, torch.optim.Adafactor])
def test_optimizers_of_whole_parameters_run_at_stage_0_only(kind: Any) -> None:
    with pytest.raises(EngineError, match=r"cannot be sharded by ZeRO stage 1: it .* whole"):
        plan(kind, 1, allow_untested=True)
    assert plan(kind, 0).client is not None


def test_a_muon_that_cannot_be_sharded_is_pointed_to_the_one_that_can() -> None:
    with pytest.raises(EngineError) as caught:
        plan(Muon, 1)
    assert '"optimizer": {"type": "Muon"}' in str(caught.value.diagnostics[0].hint)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_some_optimizers_run_at_no_stage(kind: Any) -> None:
    with pytest.raises(EngineError, match="cannot be used: it "):
        plan(kind, 0, allow_untested=True)


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adagrad(model.parameters())
    plan_from_client(optimizer, model, None, ZeroRules(0))  # the initial sums of Adagrad do not count as a step
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(EngineError, match="holds state already"):
        plan_from_client(optimizer, model, None, ZeroRules(0))


# ---- torch's schedules ----


def make_engine(**arguments: Any) -> Any:
    torch.manual_seed(0)
    model = arguments.pop("model", None) or nn.Linear(3, 1)
    config = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 0, **arguments.pop("config", {})}
    return launcher.initialize(model=model, config=config, **arguments)


def take_step(engine: Any, scale: float = 1.0, lr_kwargs: dict[str, Any] | None = None) -> None:
    engine.backward(engine(torch.ones(2, 3)).mean() * scale)
    engine.step(lr_kwargs=lr_kwargs)


@pytest.mark.filterwarnings("error")  # torch warns of schedules stepped before their optimizer
def test_a_schedule_built_on_the_clients_optimizer_drives_the_engine() -> None:
    model = nn.Linear(3, 1)
    client = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(client, step_size=2, gamma=0.1)
    engine, optimizer, _, returned = make_engine(model=model, optimizer=client, lr_scheduler=schedule)
    assert returned is schedule
    seen = []
    for _ in range(4):
        take_step(engine)
        seen.append(engine.get_lr()[0])
    assert seen == pytest.approx([0.1, 0.01, 0.01, 0.001])
    assert optimizer.param_groups is client.param_groups
    client.param_groups[0]["lr"] = 0.0
    before = model.weight.detach().clone()
    take_step(engine)
    assert torch.equal(model.weight, before)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("type_name", "params"),
    [
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 10}),
        ("CosineAnnealingLR", {"T_max": 8, "eta_min": 0.01}),
        ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3}),
    ],
)
def test_torch_schedules_by_name(type_name: str, params: dict[str, Any]) -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": type_name, "params": params},
    }
    engine, optimizer, _, schedule = make_engine(config=config)
    assert isinstance(schedule, getattr(torch.optim.lr_scheduler, type_name))
    plain_param = nn.Parameter(torch.ones(1))
    plain = torch.optim.AdamW([plain_param], lr=0.1)
    expected = getattr(torch.optim.lr_scheduler, type_name)(plain, **params)
    for _ in range(7):
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        assert optimizer.param_groups[0]["betas"] == plain.param_groups[0]["betas"]
        take_step(engine)
        plain_param.grad = torch.ones(1)
        plain.step()
        expected.step()


def test_a_skipped_step_moves_no_schedule() -> None:
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "scheduler": {"type": "ExponentialLR", "params": {"gamma": 0.5}},
    }
    engine, optimizer, *_ = make_engine(config=config)
    take_step(engine, scale=float("nan"))
    assert optimizer.overflow
    assert engine.get_lr() == [0.1]
    take_step(engine)
    assert engine.get_lr() == [0.05]


def test_a_schedule_that_needs_a_metric_is_left_to_the_script() -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    engine, _, _, schedule = make_engine(config=config, lr_scheduler=lambda o: plateau(o, patience=0, factor=0.5))
    for metric in (1.0, 1.0, 2.0):
        take_step(engine)
        schedule.step(metric)
    assert engine.get_lr() == [0.025]


class Greedy:
    """As transformers' GreedyLR: no class of torch's, and its step needs a metric."""

    def __init__(self, optimizer: Any) -> None:
        self.seen: list[float] = []

    def step(self, metrics: float, epoch: int | None = None) -> None:
        self.seen.append(metrics)


class Annealing:
    """As Megatron's: its step needs a number of samples."""

    def __init__(self, optimizer: Any) -> None:
        self.seen: list[int] = []

    def step(self, increment: int) -> None:
        self.seen.append(increment)


def test_a_schedule_whose_step_needs_an_argument_never_ends_a_training() -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with logged() as lines:
        engine, _, _, schedule = make_engine(config=config, lr_scheduler=Greedy)
    assert any("Greedy is not stepped by the engine: its step() needs metrics" in line for line in lines)
    take_step(engine)
    assert schedule.seen == []
    take_step(engine, lr_kwargs={"metrics": 0.5})
    assert schedule.seen == [0.5]
    engine, _, _, schedule = make_engine(config=config, lr_scheduler=Annealing)
    take_step(engine)  # the samples of a step, as with DeepSpeed
    take_step(engine, lr_kwargs={"increment": 7})
    assert schedule.seen == [engine.train_batch_size(), 7]


def test_arguments_that_a_schedule_does_not_take_are_refused_before_the_update() -> None:
    config = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "scheduler": {"type": "ExponentialLR", "params": {"gamma": 0.5}},
    }
    engine, *_ = make_engine(config=config)
    before = engine.state_dict()
    with pytest.raises(EngineError, match=r"ExponentialLR.*increment"):
        take_step(engine, lr_kwargs={"increment": 7})
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    engine.step()
    assert engine.global_steps == 1


@pytest.mark.parametrize("type_name", ["AdamW", "Muon"])
def test_named_parameters_are_taken_as_parameters(type_name: str) -> None:
    config = {"optimizer": {"type": type_name, "params": {"lr": 0.1}}}
    for in_a_group in (False, True):
        model = nn.Linear(3, 1)
        named = model.named_parameters()
        given = [{"params": named, "lr": 0.2}] if in_a_group else named
        engine, optimizer, *_ = make_engine(model=model, config=config, model_parameters=given)
        assert {param for group in optimizer.param_groups for param in group["params"]} == set(model.parameters())
        before = engine.state_dict()
        take_step(engine)
        assert all(not torch.equal(value, before[name]) for name, value in engine.state_dict().items())


@pytest.mark.parametrize("name", ["foreach", "fused", "capturable"])
def test_options_of_torchs_own_update_change_no_result(name: str) -> None:
    found = []
    for more in ({}, {name: True}):
        params = {"lr": 0.1, "torch_adam": True, **more}
        engine, *_ = make_engine(config={"optimizer": {"type": "AdamW", "params": params}})
        take_step(engine)
        found.append(engine.state_dict()["weight"])
    assert torch.equal(*found)


def test_torch_adam_has_the_weight_decay_of_torchs_class() -> None:
    _, optimizer, *_ = make_engine(config={"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}})
    expected = torch.optim.AdamW([nn.Parameter(torch.ones(1))]).defaults["weight_decay"]
    assert optimizer.param_groups[0]["weight_decay"] == expected


def test_a_loss_is_maximized_where_the_config_says_so() -> None:
    engine, *_ = make_engine(config={"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "maximize": True}}})
    before = engine.state_dict()["weight"]
    take_step(engine)
    assert (engine.state_dict()["weight"] > before).all()


def test_groups_cannot_be_added_to_a_running_engine() -> None:
    _, optimizer, *_ = make_engine(config={"optimizer": {"type": "SGD", "params": {}}})
    with pytest.raises(EngineError, match="cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
