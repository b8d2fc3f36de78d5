"""Schedules and optimizers of `deepspeed`, as scripts make them: the engine takes both over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.scripts import write
from harness.train.forked import run_ranks

from launcher.base.errors import EngineError
from launcher.compat.optimizers import (
    DeepSpeedCPUAdagrad,
    DeepSpeedCPUAdam,
    DeepSpeedCPULion,
    FusedAdam,
    FusedLamb,
    FusedLion,
)

SCHEDULES = """
import launcher.compat; launcher.compat.install()
import torch
from deepspeed.runtime.lr_schedules import WarmupDecayLR, WarmupLR
from launcher.optim.schedules import build_schedule

def rates(schedule):
    found = []
    for _ in range(6):
        found.append(schedule.get_last_lr()[0])
        schedule.step()
    return found

def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.3)

params = {"total_num_steps": 5, "warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 2}
expected = rates(build_schedule("WarmupDecayLR", params, optimizer()))
sgd = optimizer()
schedule = WarmupDecayLR(sgd, 5, 0.0, 0.1, warmup_num_steps=2)
assert rates(schedule) == expected and sgd.param_groups[0]["lr"] == schedule.get_last_lr()[0]
assert WarmupLR(optimizer(), 0.0, 0.1, 4, "linear", 3).last_batch_iteration == 3
groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in (0.02, 0.01)]
of_groups = torch.optim.SGD(groups)
schedule = WarmupDecayLR(of_groups, 20, warmup_max_lr=[0.08, 0.04], warmup_num_steps=4, warmup_type="linear")
assert schedule.get_last_lr() == [0.0, 0.0]
for step, factor in ((1, 0.25), (4, 1.0), (12, 0.5)):
    schedule.step(step)
    assert [group["lr"] for group in of_groups.param_groups] == [0.08 * factor, 0.04 * factor]
try:
    WarmupLR(optimizer(), no_such=1)
except Exception as error:
    assert "no_such" in str(error), error
else:
    raise AssertionError
"""


def test_schedules_can_be_made_from_an_optimizer(tmp_path: Path) -> None:
    result = run_ranks(tmp_path, 0, write(tmp_path, SCHEDULES))
    assert result.code == 0, result.err


OPTIMIZERS = """
import launcher.compat; launcher.compat.install()
import sys
import deepspeed, torch
from launcher.optim.classes import Lion

def trained(make):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    client = make(model)
    config = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 0, "zero_optimization": {"stage": 1}}
    schedule = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 1 / (1 + step))
    engine, optimizer, _, returned = deepspeed.initialize(model=model, config_params=config, optimizer=client)
    assert returned is None and optimizer.param_groups is client.param_groups
    for step in range(3):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
        schedule.step()
    name = optimizer.flat.name
    assert torch.distributed.get_world_size() == 1  # accelerate gathers over a group, also in a process that is alone
    engine.destroy()
    return name, model.weight.detach().clone()

def groups(model):
    return [{"params": [model.weight], "lr": 0.05}, {"params": [model.bias], "weight_decay": 0.0}]

ops, optim = deepspeed.ops, torch.optim
adam, adagrad, lion = ops.adam, ops.adagrad.DeepSpeedCPUAdagrad, ops.lion.DeepSpeedCPULion
pairs = [
    (
        lambda m: adam.DeepSpeedCPUAdam(groups(m), lr=0.1, weight_decay=0.2),
        lambda m: optim.AdamW(groups(m), lr=0.1, weight_decay=0.2),
    ),
    (
        lambda m: adam.DeepSpeedCPUAdam(optim.Adam(groups(m), lr=0.1, weight_decay=0.2).param_groups, adamw_mode=False),
        lambda m: optim.Adam(groups(m), lr=0.1, weight_decay=0.2),
    ),
    (
        lambda m: adam.DeepSpeedCPUAdam(optim.AdamW(groups(m), lr=0.1).param_groups, lr=0.1, adamw_mode=True),
        lambda m: optim.AdamW(groups(m), lr=0.1),
    ),
    (lambda m: adam.FusedAdam(m.parameters(), lr=0.1), lambda m: optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.0)),
    (
        lambda m: adagrad(optim.Adagrad(groups(m), lr=0.1).param_groups, lr=0.1, adamw_mode=False),
        lambda m: optim.Adagrad(groups(m), lr=0.1),
    ),
    (lambda m: lion(groups(m), lr=0.1), lambda m: Lion(groups(m), lr=0.1)),
    (lambda m: ops.lion.FusedLion(m.parameters(), lr=0.1), lambda m: Lion(m.parameters(), lr=0.1)),
]
for ours, reference in pairs:
    (name, weight), (other_name, other) = trained(ours), trained(reference)
    assert name == other_name, (name, other_name)
    assert torch.equal(weight, other), (name, weight, other)

# As accelerate makes them where the states are offloaded: the engine's kernels have to take the steps.
for client, theirs in ((adam.DeepSpeedCPUAdam, optim.AdamW), (adagrad, optim.Adagrad)):
    model = torch.nn.Linear(4, 3)
    client = client(theirs(groups(model), foreach=True).param_groups)
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    deepspeed.initialize(model=model, config_params=config, optimizer=client)[0].destroy()

# Without an engine, states of parameters in 16 bits are in fp32: a step is that of fp32, rounded.
for in_fp32 in (True, False):
    narrow = torch.nn.Parameter(torch.linspace(1, 2, 8).bfloat16())
    wide = torch.nn.Parameter(narrow.detach().float())
    ours, plain = adam.DeepSpeedCPUAdam([narrow], lr=0.1, fp32_optimizer_states=in_fp32), optim.AdamW([wide], lr=0.1)
    plain.param_groups[0]["weight_decay"] = 0.0
    narrow.grad = torch.linspace(-1, 1, 8).bfloat16()
    wide.grad, before = narrow.grad.float(), narrow.data
    assert ours.step(lambda: 3) == 3 and narrow.data.data_ptr() == before.data_ptr()
    assert narrow.grad.dtype == narrow.dtype == torch.bfloat16
    plain.step()
    assert ours.state[narrow]["exp_avg"].dtype == (torch.float32 if in_fp32 else torch.bfloat16)
    assert not in_fp32 or torch.equal(narrow, wide.bfloat16())
    assert ours.adam_w_mode
    ours.load_state_dict(ours.state_dict())  # torch gives the states the dtype of the parameters
    ours.step()
    assert ours.state[narrow]["exp_avg"].dtype == (torch.float32 if in_fp32 else torch.bfloat16)
double = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
double.grad = torch.ones_like(double)
optimizer = adam.DeepSpeedCPUAdam([double])
optimizer.step()
assert optimizer.state[double]["exp_avg"].dtype == double.dtype == torch.float64
on_meta = torch.nn.Parameter(torch.ones(2, device="meta"))
on_meta.grad = torch.ones(2, device="meta")
try:
    adam.DeepSpeedCPUAdam([on_meta]).step()
except AssertionError as error:
    assert "one is on meta" in str(error)
else:
    raise RuntimeError

print("others")
adam.DeepSpeedCPUAdam(optim.SGD(groups(torch.nn.Linear(4, 3)), lr=0.1).param_groups, adamw_mode=False)

class Mine(adam.DeepSpeedCPUAdam):
    pass

try:
    trained(lambda m: Mine(m.parameters()))
except Exception as error:
    assert "Mine is untested" in str(error), error
else:
    raise AssertionError
"""


def test_the_engine_takes_the_optimizers_over(tmp_path: Path) -> None:
    result = run_ranks(tmp_path, 0, write(tmp_path, OPTIMIZERS), env={"CUDA_VISIBLE_DEVICES": ""})
    assert result.code == 0, result.err
    before, after = result.out.split("others\n")
    warning = "Adam updates the parameters in place of the optimizer whose groups have dampening, momentum, nesterov: "
    assert warning not in before
    assert warning in after


def _param(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.linspace(1, 2, 8).to(dtype))
    param.grad = torch.linspace(-1, 1, 8).to(dtype)
    return param


def test_arguments_come_in_the_order_of_deepspeed() -> None:
    betas = (0.8, 0.9)
    lamb = FusedLamb([_param()], 0.1, False, betas, 1e-6, True, 0.2, 0.0, 5.0, 0.1, False).defaults
    assert (lamb["lr"], lamb["bias_correction"], lamb["betas"], lamb["eps"]) == (0.1, False, betas, 1e-6)
    assert (lamb["eps_inside_sqrt"], lamb["weight_decay"]) == (True, 0.2)
    assert (lamb["max_coeff"], lamb["min_coeff"]) == (5.0, 0.1)
    assert DeepSpeedCPULion([_param()], 0.1, betas, 0.2, False).fp32_optimizer_states is False
    assert DeepSpeedCPUAdagrad([_param()], 0.1, 1e-6, 0.2, False, False).fp32_optimizer_states is False
    with pytest.raises(EngineError, match="amsgrad"):
        DeepSpeedCPUAdagrad([_param()], amsgrad=True)


@pytest.mark.parametrize("keeps", [True, False])
def test_gradients_are_dropped_or_filled_with_zeros(keeps: bool) -> None:
    betas = (0.8, 0.9)
    for make in (
        lambda params: FusedAdam(params, 0.1, True, betas, 1e-6, True, 0.2, False, not keeps),
        lambda params: FusedLion(params, 0.1, betas, 0.2, not keeps),
    ):
        param = _param()
        make([param]).zero_grad()
        assert (param.grad is not None) == keeps
        assert param.grad is None or not param.grad.any()


@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize(("kind", "state"), [(DeepSpeedCPULion, "exp_avg"), (DeepSpeedCPUAdagrad, "sum")])
def test_states_of_16_bits_are_in_fp32_without_an_engine(kind: Any, state: str, in_fp32: bool) -> None:
    narrow, wide = _param(torch.bfloat16), _param(torch.bfloat16)
    wide = torch.nn.Parameter(wide.detach().float())
    assert narrow.grad is not None
    wide.grad = narrow.grad.float()
    ours, plain = kind([narrow], lr=0.1, fp32_optimizer_states=in_fp32), kind([wide], lr=0.1)
    ours.step()
    plain.step()
    assert ours.state[narrow][state].dtype == (torch.float32 if in_fp32 else torch.bfloat16)
    assert narrow.dtype == narrow.grad.dtype == torch.bfloat16
    assert not in_fp32 or torch.equal(narrow, wide.bfloat16())


def _states(optimizer: DeepSpeedCPUAdam, subgroup: int) -> list[torch.Tensor]:
    return [optimizer.state[subgroup][name].clone() for name in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("is_decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_steps_of_a_subgroup_can_be_undone(is_decoupled: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(64).to(dtype)) for _ in range(2)]
    plain = torch.nn.Parameter(params[0].detach().clone())
    kind = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    reference = kind([plain], lr=0.1, weight_decay=0.1)
    optimizer = DeepSpeedCPUAdam(params[:1], lr=0.1, weight_decay=0.1, adamw_mode=is_decoupled)
    before, gradients = [], [torch.randn(64).to(dtype) for _ in range(3)]
    for gradient in gradients:
        for number, param in enumerate(params):  # the other one has as many steps, and the same values in the end
            optimizer.param_groups[0]["params"] = [param]
            param.grad = gradient.clone()
            if number == 0:
                before.append((param.detach().clone(), *(_states(optimizer, 0) if optimizer.state else [])))
            optimizer.step_subgroup(number)
        plain.grad = gradient.clone()
        reference.step()
    if dtype != torch.bfloat16:  # its states are in fp32, those of torch are not
        torch.testing.assert_close(params[0], plain)
    assert set(optimizer.state) == {0, 1}
    optimizer.param_groups[0]["params"] = params[:1]
    for step, gradient in reversed(list(enumerate(gradients))):
        params[0].grad = gradient
        optimizer.rollback_subgroup(0)
        assert (optimizer.state[0]["step"], optimizer.state[1]["step"]) == (step, 3)
        value, *states = before[step]
        tolerance = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1}[dtype]
        torch.testing.assert_close(params[0].detach(), value, rtol=tolerance, atol=tolerance)
        for found, expected in zip(_states(optimizer, 0), states, strict=False):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_what_cannot_be_undone_is_an_error() -> None:
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    optimizer = DeepSpeedCPUAdam(params)
    assert optimizer.step_subgroup(0, lambda: 5) == 5
    with pytest.raises(RuntimeError, match="sub_group_id 0 as it has not been initialized"):
        optimizer.rollback_subgroup(0)
    params[0].grad = torch.ones(4)
    optimizer.step_subgroup(0)
    optimizer.rollback_subgroup(0)
    with pytest.raises(RuntimeError, match="sub_group_id 0: step count is 0"):
        optimizer.rollback_subgroup(0)
    params[1].grad = torch.ones(4)
    with pytest.raises(EngineError, match="2 parameters have gradients"):
        optimizer.step_subgroup(0)
    params[1].grad = None
    optimizer = DeepSpeedCPUAdam(params, amsgrad=True)
    optimizer.step_subgroup(0)
    with pytest.raises(EngineError, match="amsgrad"):
        optimizer.rollback_subgroup(0)
