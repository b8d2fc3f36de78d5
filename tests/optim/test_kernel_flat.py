"""Shards updated by kernels: options that change, states of torch's own optimizers, many small shards."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness.train.shards import full_shard, shards_of_unit
from torch import Tensor, nn

from launcher.base.errors import EngineError
from launcher.comm.buffers import BufferPool
from launcher.kernels.api import Kernel, Span
from launcher.kernels.reference import ReferenceKernel
from launcher.kernels.select import kernel_for
from launcher.optim.api import FlatOptimizer
from launcher.optim.factory import OptimizerBackend, ZeroRules, plan_from_client, plan_from_config

NUMEL = 10
TYPES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"weight_decay": 0.1}),
    ("Adam", {"adam_w_mode": False}),
    ("Adagrad", {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Lion", {"betas": [0.9, 0.99]}),
]


def kernels() -> dict[str, Kernel]:
    return {"cpu": kernel_for("cpu") or ReferenceKernel()}


def make(name: str, params: dict[str, Any], by: dict[str, Kernel]) -> FlatOptimizer:
    """Two parameters in one unit: of 4 elements, and of the rest."""
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).split([4, NUMEL - 4])
    plan = plan_from_config(name, params, nn.Linear(1, 1), None)
    return plan.build(shards_of_unit(values, range(NUMEL)), OptimizerBackend(by, BufferPool(torch.device("cpu"))))


def master(flat: FlatOptimizer) -> Tensor:
    return torch.cat([shard.master for shard in flat.shards])


def step(flat: FlatOptimizer, number: int, *unused: str) -> None:
    grads = torch.randn(NUMEL, generator=torch.Generator().manual_seed(number + 1)).split([4, NUMEL - 4])
    for shard, grad in zip(flat.shards, grads, strict=True):
        shard.grad.copy_(grad)
    flat.step(unused=unused)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("from_kernel", [True, False])
@pytest.mark.parametrize(("name", "params"), TYPES)
def test_states_go_from_kernels_to_torch_and_back(
    name: str, params: dict[str, Any], from_kernel: bool, num_steps: int
) -> None:
    flat = make(name, params, kernels() if from_kernel else {})
    other = make(name, params, {} if from_kernel else kernels())
    assert flat.label != other.label
    for number in range(num_steps):
        step(flat, number, *(["p0"] if number == 1 else []))
    for shard, other_shard in zip(flat.shards, other.shards, strict=True):
        other_shard.master.copy_(shard.master)
    other.load_state_dict(copy.deepcopy(flat.state_dict()))
    for number in range(num_steps, num_steps + 3):
        for each in (flat, other):
            step(each, number, *(["p1"] if number == 4 else []))
    torch.testing.assert_close(master(other), master(flat), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "params"), TYPES)
def test_options_may_be_tensors_and_lists(name: str, params: dict[str, Any]) -> None:
    flat, other = make(name, params, kernels()), make(name, params, kernels())
    for key in {"lr", "weight_decay", "eps", "lr_decay", "momentum"} & other.param_groups[0].keys():
        other.param_groups[0][key] = torch.tensor(float(other.param_groups[0][key]), dtype=torch.float64)
    if "betas" in other.param_groups[0]:
        other.param_groups[0]["betas"] = [
            torch.tensor(beta, dtype=torch.float64) for beta in params.get("betas", (0.9, 0.999))
        ]
    for number in range(3):
        step(flat, number)
        step(other, number)
    assert torch.equal(master(flat), master(other))


def test_a_rate_that_is_a_tensor_is_copied_with_the_state() -> None:
    flat = make("SGD", {}, kernels())
    flat.param_groups[0]["lr"] = torch.tensor(0.1)
    other = make("SGD", {}, kernels())
    other.load_state_dict(flat.state_dict())
    flat.param_groups[0]["lr"].fill_(9.0)
    assert float(other.param_groups[0]["lr"]) == pytest.approx(0.1)


def test_momentum_may_come_late_and_pause() -> None:
    flat = make("SGD", {"lr": 0.1}, kernels())
    param = nn.Parameter(master(flat))
    plain = torch.optim.SGD([param], lr=0.1)
    for number, momentum in enumerate((0.0, 0.9, 0.9, 0.0, 0.9)):
        flat.param_groups[0]["momentum"] = plain.param_groups[0]["momentum"] = momentum
        step(flat, number)
        param.grad = torch.cat([shard.grad for shard in flat.shards])
        plain.step()
    torch.testing.assert_close(master(flat), param.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_an_option_set_too_late_is_refused_and_nothing_is_updated(option: str) -> None:
    flat = make("AdamW", {}, kernels())
    step(flat, 0)
    before = master(flat)
    flat.param_groups[0][option] = True
    with pytest.raises(EngineError, match=f"optimizer group 0 sets {option}"):
        step(flat, 1)
    assert torch.equal(master(flat), before)


def test_torch_refuses_too_late_what_only_kernels_do() -> None:
    flat = make("AdamW", {}, {})
    step(flat, 0)
    before = master(flat)
    flat.param_groups[0]["bias_correction"] = False
    with pytest.raises(EngineError, match="optimizer group 0 turns bias_correction off, but torch's AdamW"):
        step(flat, 1)
    assert torch.equal(master(flat), before)


def test_a_state_of_other_steps_is_refused_before_anything_is_overwritten() -> None:
    given = make("AdamW", {"amsgrad": True}, kernels())  # torch's own takes it
    step(given, 0)
    flat = make("AdamW", {}, kernels())
    with pytest.raises(EngineError, match="sets amsgrad"):
        flat.load_state_dict(given.state_dict())
    assert not flat.param_groups[0]["amsgrad"]


def test_groups_without_parameters_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    client = torch.optim.AdamW([{"params": list(model.parameters())}, {"params": [], "lr": 0.5}])
    plan = plan_from_client(client, model, None, ZeroRules(1))
    shard = full_shard(torch.ones(4))
    shard.grad.fill_(1.0)
    flat = plan.build([shard], OptimizerBackend(kernels(), BufferPool(torch.device("cpu"))))
    flat.step()
    flat.load_state_dict(copy.deepcopy(flat.state_dict()))
    assert len(flat.state_dict()["groups"]) == 2
    assert not torch.equal(shard.master, torch.ones(4))


class Counting(ReferenceKernel):
    """Takes note of how it is called."""

    def __init__(self) -> None:
        self.calls: list[Sequence[Span]] = []

    def update(self, spans: Sequence[Span], grad_scale: float = 1.0) -> None:
        self.calls.append(spans)


def test_many_small_shards_are_one_call_with_one_rule_and_no_copy() -> None:
    plan, counting = plan_from_config("AdamW", {}, nn.Linear(1, 1), None), Counting()
    shards = [full_shard(torch.ones(3), name=f"p{number}", unit=number) for number in range(2000)]
    flat = plan.build(shards, OptimizerBackend({"cpu": counting}, BufferPool(torch.device("cpu"))))
    flat.step()
    [spans] = counting.calls
    assert len(spans) == 2000
    assert len({id(span.rule) for span in spans}) == 1
    assert all(span.master is shard.master for span, shard in zip(spans, shards, strict=True))


def test_neighbours_that_take_the_same_step_are_one_span() -> None:
    plan, counting = plan_from_config("AdamW", {}, nn.Linear(1, 1), None), Counting()
    shards = shards_of_unit([torch.ones(3)] * 5, range(1, 13))  # some of the first and last, all of the others
    flat = plan.build(shards, OptimizerBackend({"cpu": counting}, BufferPool(torch.device("cpu"))))
    for unused in ([], ["p2"], []):
        flat.step(unused=unused)
    assert [[span.master.numel() for span in spans] for spans in counting.calls] == [[12], [5, 4], [5, 3, 4]]
    assert counting.calls[0][0].master.data_ptr() == shards[0].master.data_ptr()


def test_the_kernel_gets_every_element_once_in_many_shards() -> None:
    """What is packed for the C++ library has its fields in their places, whatever a span has of them."""
    generator = torch.Generator().manual_seed(0)
    found: list[list[Tensor]] = []
    for by in (kernels(), {"cpu": ReferenceKernel()}):
        generator.manual_seed(0)
        shards = [
            full_shard(
                torch.randn(number % 7 + 1, generator=generator),
                name=f"p{number}",
                group=number % 2,
                unit=number,
                param=torch.zeros(number % 7 + 1, dtype=torch.bfloat16) if number % 3 else None,
            )
            for number in range(200)
        ]
        for shard in shards:
            shard.grad.copy_(torch.randn(shard.numel, generator=generator))
        model = nn.Linear(1, 1)
        groups = [{"params": [model.weight], "momentum": 0.9}, {"params": [model.bias], "momentum": 0.0}]
        flat = plan_from_config("SGD", {"lr": 0.1}, model, groups).build(
            shards, OptimizerBackend(by, BufferPool(torch.device("cpu")))
        )
        for _ in range(2):
            flat.step(grad_scale=0.5)
        found.append([kept for shard in shards for kept in (shard.master, shard.param) if kept is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
