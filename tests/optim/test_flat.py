"""Flat shards: parameters that sit out steps, states that travel, optimizers that are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import launcher
from launcher.base.errors import EngineError
from launcher.comm.buffers import BufferPool
from launcher.kernels.reference import ReferenceKernel
from launcher.optim.api import FlatOptimizer, FlatShard
from launcher.optim.catalog import ELEMENTWISE
from launcher.optim.factory import Means, OptimizerPlan, ZeroRules, plan_from_client, plan_from_config

SIZES = (6, 1, 9, 4)
OFFSETS = (0, 6, 7, 16, 20)
OPTIONS = {"SGD": {"momentum": 0.9, "weight_decay": 0.1}, "Lion": {"weight_decay": 0.1}, "AdamW": {"weight_decay": 0.1}}
# Which of the four parameters have a gradient in each step.
USED = [{0, 1, 2, 3}, {0, 2}, {0, 1, 2, 3}, {2, 3}, {0, 1, 2, 3}]
USED_LATE = [{0, 2}, {0, 2}, {0, 1, 2}, {1}, {0, 1, 2, 3}]


def values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


MakeFlat = Callable[[str, list[FlatShard]], FlatOptimizer]


@pytest.fixture(params=["torch", "kernel"])
def make_flat(request: pytest.FixtureRequest) -> MakeFlat:
    means = Means({"cpu": ReferenceKernel()} if request.param == "kernel" else {}, BufferPool(torch.device("cpu")))

    def make(name: str, shards: list[FlatShard]) -> FlatOptimizer:
        return plan_from_config(name, OPTIONS.get(name, {}), nn.Linear(1, 1), None).build(shards, means)

    return make


def two_shards() -> list[FlatShard]:
    """One owned range of 20 elements in two shards, cut in the middle of a parameter."""
    whole = torch.cat(values(0))
    return [
        FlatShard(whole[:10].clone(), torch.zeros(10), 0, unit=3, start=0),
        FlatShard(whole[10:].clone(), torch.zeros(10), 0, unit=3, start=10),
    ]


def take(flat: FlatOptimizer, shards: list[FlatShard], step: int, used: set[int]) -> None:
    grad = torch.cat(values(step + 1))
    for shard in shards:
        shard.grad.copy_(grad[shard.start : shard.start + 10])
    unused = [range(OFFSETS[i], OFFSETS[i + 1]) for i in range(4) if i not in used]
    flat.step({3: unused} if unused else None)


@pytest.mark.parametrize("schedule", [USED, USED_LATE], ids=["pauses", "joins late"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_parameter_without_gradient_is_skipped_as_torch_skips_it(
    name: str, schedule: list[set[int]], make_flat: MakeFlat
) -> None:
    shards = two_shards()
    flat = make_flat(name, shards)
    params = values(0)
    kind = ELEMENTWISE["AdamW" if name == "Adam" else name]
    defaults = {"lr": flat.param_groups[0]["lr"], "weight_decay": 0.0} if name in ("Adam", "AdamW") else {}
    plain = kind(params, **{"lr": flat.param_groups[0]["lr"], **defaults, **OPTIONS.get(name, {})})  # type: ignore[call-arg]
    for step, used in enumerate(schedule):
        take(flat, shards, step, used)
        for index, (param, grad) in enumerate(zip(params, values(step + 1), strict=True)):
            param.grad = grad if index in used else None
        plain.step()
        torch.testing.assert_close(torch.cat([s.master for s in shards]), torch.cat(params), rtol=1e-5, atol=1e-6)


def test_most_steps_cut_nothing(make_flat: MakeFlat) -> None:
    shards = two_shards()
    flat = make_flat("AdamW", shards)
    take(flat, shards, 0, {0, 1, 2, 3})
    assert [len(flat.states(number)) for number in range(2)] == [1, 1]
    take(flat, shards, 1, {0, 2, 3})  # the second parameter: element 6
    assert [[(run.start, run.stop) for run in flat.states(number)] for number in range(2)] == [
        [(0, 6), (6, 7), (7, 10)],
        [(0, 10)],
    ]
    assert flat.state_numel() == 2 * 20


def test_cut_states_stay_views_of_one(make_flat: MakeFlat) -> None:
    shards = two_shards()
    flat = make_flat("AdamW", shards)
    take(flat, shards, 0, {0, 1, 2, 3})
    storage = flat.states(0)[0].state["exp_avg"].untyped_storage().data_ptr()
    take(flat, shards, 1, {0, 2, 3})
    assert {run.state["exp_avg"].untyped_storage().data_ptr() for run in flat.states(0)} == {storage}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_state_continues_where_it_was(name: str, make_flat: MakeFlat) -> None:
    shards = two_shards()
    flat = make_flat(name, shards)
    for step in range(3):
        take(flat, shards, step, USED[step])
    flat.param_groups[0]["lr"] *= 0.5
    others = [FlatShard(s.master.clone(), torch.zeros(10), 0, unit=3, start=s.start) for s in shards]
    other = make_flat(name, others)
    take(other, others, 9, {0, 1})  # state that must be forgotten
    for old, new in zip(shards, others, strict=True):
        new.master.copy_(old.master)
    other.load_state_dict(copy.deepcopy(flat.state_dict()))
    assert other.param_groups[0]["lr"] == flat.param_groups[0]["lr"]
    for step in range(3, 5):
        take(flat, shards, step, USED[step])
        take(other, others, step, USED[step])
    for old, new in zip(shards, others, strict=True):
        assert torch.equal(old.master, new.master)


def test_a_finely_cut_state_is_joined_again(make_flat: MakeFlat) -> None:
    shards = two_shards()
    flat = make_flat("AdamW", shards)
    take(flat, shards, 0, {0, 1, 2, 3})
    state = copy.deepcopy(flat.state_dict())
    state["shards"][0] = [
        {
            "start": start,
            "stop": start + 2,
            "state": {
                name: value[start : start + 2] if value.dim() else value
                for name, value in state["shards"][0][0]["state"].items()
            },
        }
        for start in range(0, 10, 2)
    ]
    others = two_shards()
    other = make_flat("AdamW", others)
    other.load_state_dict(state)
    assert len(other.states(0)) == 1
    assert torch.equal(other.states(0)[0].state["exp_avg"], flat.states(0)[0].state["exp_avg"])


def test_the_state_of_another_optimizer_is_refused(make_flat: MakeFlat) -> None:
    state = make_flat("SGD", two_shards()).state_dict()
    with pytest.raises(EngineError, match="SGD with 1 groups over 2 shards, this run has AdamW"):
        make_flat("AdamW", two_shards()).load_state_dict(state)


def test_a_rank_may_own_nothing_of_a_group() -> None:
    for name in ELEMENTWISE:
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias]}]
        plan = plan_from_config(name, {}, model, groups)
        shard = FlatShard(torch.ones(4), torch.ones(4), group=1)
        plan.build([shard], Means({}, BufferPool(torch.device("cpu")))).step()
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
    assert plan(kind, 0).whole_parameters


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


def take_step(engine: Any, scale: float = 1.0) -> None:
    engine.backward(engine(torch.ones(2, 3)).mean() * scale)
    engine.step()


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


def test_groups_cannot_be_added_to_a_running_engine() -> None:
    _, optimizer, *_ = make_engine(config={"optimizer": {"type": "SGD", "params": {}}})
    with pytest.raises(EngineError, match="cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
