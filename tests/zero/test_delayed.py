"""`delayed_update`: the same bits as a loop that is one step behind; the update runs beside forward and backward.

Copies run as late as a GPU's may (`LateCopier`): what a thread reads or overwrites too early shows in the bits.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from harness.launch.command import slowness
from harness.logs import logged
from harness.train.offload import late_link
from harness.train.parity import RESTLESS_SCALE, Case, Trajectory, train_engine, train_fp32, train_mixed, worst_relative
from harness.train.ranks import run_on_ranks
from harness.train.zoo import SAMPLES, batches, build
from torch import Tensor

import launcher
from launcher.base.errors import ConfigError, EngineError
from launcher.kernels.api import Span
from launcher.kernels.reference import ReferenceKernel
from launcher.zero.access import safe_get_full_fp32_param, safe_set_full_fp32_param
from launcher.zero.gathered import GatheredParameters

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_IN_ORDER = 3
DELAYED = {"device": "cpu", "delayed_update": True, "delayed_update_warmup_steps": NUM_IN_ORDER}
AT_ONCE = {**DELAYED, "delayed_update_warmup_steps": 0}
SHARDED = {"stage3_param_persistence_threshold": 0}
HOST = {"device": "cpu"}
SETTINGS: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {}), (3, {}), (3, {"offload_param": HOST})]
NAMES = ["1", "2", "3", "3 both"]
settings = pytest.mark.parametrize(("stage", "more"), SETTINGS, ids=NAMES)
TIMEOUT_S = 60.0


# ---- against a loop ----


def _train(rank: int, world_size: int, case: Case) -> Trajectory:
    with late_link():
        return train_engine(rank, world_size, case)


def _check(case: Case, world_size: int) -> Trajectory:
    found: Trajectory = run_on_ranks(world_size, _train, case)[0]
    expected = train_mixed(case, world_size, found.grad_norms, num_in_order=NUM_IN_ORDER)
    assert found.losses == expected.losses
    assert found.scales == expected.scales
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())
    if case.precision == "fp32":
        assert worst_relative(found.losses, train_fp32(case).losses) > 1e-3, "nothing was delayed"
    return found


# Each two of setting, precision and accumulation together, and all three in the soak.
RUNS = [
    pytest.param(
        *setting,
        ("fp32", "bf16")[is_bf16],
        (1, 3)[is_accumulated],
        id=f"{NAMES[number]}-{('fp32', 'bf16')[is_bf16]}-{(1, 3)[is_accumulated]}",
        marks=pytest.mark.soak if (number + is_bf16 + is_accumulated) % 2 else [],
    )
    for (number, setting), is_bf16, is_accumulated in itertools.product(enumerate(SETTINGS), (0, 1), (0, 1))
]


@pytest.mark.parametrize(("stage", "more", "precision", "accumulation"), RUNS)
def test_the_same_bits_as_a_loop_one_step_behind(
    stage: int, more: dict[str, Any], precision: str, accumulation: int
) -> None:
    zero = {**SHARDED, "offload_optimizer": DELAYED, **more}
    case = Case(stage, precision, accumulation, 8, unit_numel=2500, clipping=0.0, zero=zero, unused=True)
    _check(case, world_size=2)


@settings
def test_overflows_publish_what_was_updated_before(stage: int, more: dict[str, Any]) -> None:
    zero = {**SHARDED, "offload_optimizer": DELAYED, **more}
    found = _check(Case(stage, "fp16", 1, num_steps=20, unit_numel=2500, fp16=RESTLESS_SCALE, zero=zero), 2)
    is_finite = list(map(math.isfinite, found.grad_norms))
    after = next(step for step, taken in enumerate(itertools.accumulate(is_finite)) if taken > NUM_IN_ORDER)
    assert is_finite[after:].count(False) >= 2, "no update was under way at an overflow"


@pytest.mark.parametrize(("overlap", "accumulation"), [(True, 2), (False, 1)])
def test_alone(overlap: bool, accumulation: int) -> None:
    """The first sum of a step has 16 bits there: its memory is fp32's in the step after, or the step before."""
    zero = {**SHARDED, "offload_optimizer": {**DELAYED, "cpuadam_cores_perc": 0.5}}
    _check(Case(2, "bf16", accumulation, overlap=overlap, zero=zero), world_size=1)


# ---- when things happen ----


class HeldKernel(ReferenceKernel):
    """Updates when it is released; fails where the test wants it to."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.events: list[str] = []
        self.fails = False

    def update(self, spans: Sequence[Span], grad_scale: float = 1.0) -> None:
        assert self.may_go.wait(TIMEOUT_S * slowness()), "somebody waits for an update that waits for them"
        if self.fails:
            raise ValueError("no update today")
        super().update(spans, grad_scale)
        self.events.append("update")


@contextlib.contextmanager
def held_kernel() -> Iterator[HeldKernel]:
    """Have engines made within this block update by a kernel that is held."""
    kernel = HeldKernel()
    with mock.patch("launcher.engine.optimizer_plan.kernel_for", return_value=kernel), late_link():
        yield kernel


def start(stage: int, more: dict[str, Any], **keys: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **SHARDED, "offload_optimizer": AT_ONCE, **more},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **keys,
    }
    return launcher.initialize(model=build("Plain"), config=config)[0]


def take_step(engine: Any, number: int) -> None:
    x, y = batches(number + 1)[number]
    engine.backward(engine(x, y))
    engine.step()


@settings
def test_an_update_runs_beside_the_next_forward_and_backward(stage: int, more: dict[str, Any]) -> None:
    with held_kernel() as kernel:
        engine = start(stage, more)
        take_step(engine, 0)
        kernel.events.append("step 1 has returned")
        x, y = batches(2)[1]
        engine.backward(engine(x, y))
        kernel.events.append("backward 2 has returned")
        kernel.may_go.set()
        engine.step()
        kernel.events.append("step 2 has returned")
        engine.synchronize_parameters()
        free = start(stage, more)
        for number in range(2):
            take_step(free, number)
        free.synchronize_parameters()
        assert all(map(torch.equal, _weights(engine), _weights(free))), "the second gradient came into the first update"
    assert kernel.events[:3] == ["step 1 has returned", "backward 2 has returned", "update"]


def _weights(engine: Any) -> list[Tensor]:
    return list(engine.state_dict().values())


@settings
def test_an_update_has_the_hyper_parameters_of_its_step(stage: int, more: dict[str, Any]) -> None:
    found = []
    for rate_meanwhile in (1e-2, 5.0):
        with held_kernel() as kernel:
            engine = start(stage, more)
            take_step(engine, 0)
            engine.optimizer.param_groups[0]["lr"] = rate_meanwhile
            kernel.may_go.set()
            engine.synchronize_parameters()
            found.append(_weights(engine))
    assert all(map(torch.equal, *found))


@settings
def test_weights_are_a_step_behind_until_they_are_synchronized(stage: int, more: dict[str, Any]) -> None:
    with late_link():
        engine = start(stage, more)
        first = _weights(engine)
        take_step(engine, 0)
        assert all(map(torch.equal, _weights(engine), first))
        engine.synchronize_parameters()
        second = _weights(engine)
        assert not any(map(torch.equal, second, first))
        engine.synchronize_parameters()
        assert all(map(torch.equal, _weights(engine), second)), "nothing is left to come"
        in_order = start(stage, {**more, "offload_optimizer": HOST})
        take_step(in_order, 0)
        assert all(map(torch.equal, _weights(in_order), second))


@settings
def test_what_goes_wrong_in_an_update_is_raised_by_the_next_step(stage: int, more: dict[str, Any]) -> None:
    with held_kernel() as kernel:
        engine = start(stage, more)
        kernel.fails = True
        kernel.may_go.set()
        take_step(engine, 0)
        with pytest.raises(ValueError, match="no update today"):
            take_step(engine, 1)


# ---- what scripts do meanwhile ----


@settings
def test_masters_are_read_and_written_after_their_update(stage: int, more: dict[str, Any]) -> None:
    with held_kernel() as kernel:
        engine = start(stage, more)
        param = dict(engine.module.named_parameters())["head.weight"]
        before = safe_get_full_fp32_param(param)
        take_step(engine, 0)
        threading.Timer(0.2, kernel.may_go.set).start()
        after = safe_get_full_fp32_param(param)
        assert before is not None
        assert after is not None
        assert not torch.equal(before, after)
        take_step(engine, 1)
        safe_set_full_fp32_param(param, torch.full_like(before, 0.25))
        assert torch.equal(engine.state_dict()["head.weight"], torch.full_like(before, 0.25))
        engine.synchronize_parameters()
        assert torch.equal(engine.state_dict()["head.weight"], torch.full_like(before, 0.25))


def _synchronizes(rank: int, world_size: int, stage: int, more: dict[str, Any]) -> bool:
    with late_link():
        engine = start(stage, more)
        for number in range(3):
            take_step(engine, number)
        engine.synchronize_parameters()  # the update before the last is on its way still
        params = dict(engine.module.named_parameters())
        masters = {name: safe_get_full_fp32_param(param) for name, param in params.items()}
        return all(torch.equal(value, masters[name]) for name, value in engine.state_dict().items())


@settings
def test_ranks_synchronize_right_after_a_step(stage: int, more: dict[str, Any]) -> None:
    assert run_on_ranks(2, _synchronizes, stage, more) == [True, True]


def _gathers(rank: int, world_size: int, stage: int, more: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights after a step and a change of one, delayed and in order."""
    found = []
    for optimizer in (AT_ONCE, HOST):
        with late_link():
            engine = start(stage, {**more, "offload_optimizer": optimizer})
            take_step(engine, 0)
            with GatheredParameters(engine.module.head.weight, modifier_rank=0):
                if rank == 0:
                    engine.module.head.weight.data.mul_(2.0)
            take_step(engine, 1)
            engine.synchronize_parameters()
            found.append(_weights(engine))
    return found[0], found[1]


@settings
def test_an_update_under_way_is_not_lost_to_a_modified_parameter(stage: int, more: dict[str, Any]) -> None:
    for delayed, in_order in run_on_ranks(2, _gathers, stage, more):
        assert all(map(torch.equal, delayed, in_order))


@pytest.mark.parametrize("how", ["earlier list", "data", "reads"])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_write_beside_an_update_is_an_error(stage: int, how: str) -> None:
    """The update overwrites it; once the parameters have followed, a write counts."""
    with late_link():
        engine = start(stage, {})
        mine = dict(engine.module.named_parameters())
        take_step(engine, 0)
        x, y = batches(2)[1]
        engine.backward(engine(x, y))
        with torch.no_grad():
            if how == "earlier list":
                mine["head.weight"].fill_(0.25)
            elif how == "data":
                engine.module.head.weight.data.fill_(0.25)
            else:
                assert all(param.norm() >= 0 for param in engine.module.parameters())
        if how != "reads":
            with pytest.raises(EngineError, match=r"was written while an update that will overwrite it was under way"):
                engine.step()
        engine.step()
        engine.synchronize_parameters()
        with torch.no_grad():
            mine["head.weight"].fill_(0.25)
        found = safe_get_full_fp32_param(mine["head.weight"])
        assert found is not None
        assert torch.equal(found, torch.full_like(found, 0.25))
        take_step(engine, 2)
        engine.synchronize_parameters()
        assert (engine.module.head.weight - 0.25).abs().max() <= 1.1e-2  # a step of AdamW


def _synchronizes_after_a_write_on_one_rank(rank: int, world_size: int) -> Tensor:
    with late_link():
        engine = start(2, {})
        take_step(engine, 0)
        if rank == 1:
            engine.module.head.weight.data.fill_(0.25)
        with pytest.raises(EngineError, match=r"^rank 1: .* was written while an update that will overwrite it"):
            engine.synchronize_parameters()
        engine.synchronize_parameters()
        take_step(engine, 1)
        engine.synchronize_parameters()
        return _weights(engine)[0]


def test_a_write_on_one_rank_beside_an_update_is_an_error_on_every_rank() -> None:
    one, other = run_on_ranks(2, _synchronizes_after_a_write_on_one_rank)
    assert torch.equal(one, other)


def test_states_are_read_after_their_update() -> None:
    with held_kernel() as kernel:
        engine = start(2, {})
        take_step(engine, 0)
        threading.Timer(0.2, kernel.may_go.set).start()
        states = [piece["state"] for [piece] in engine.optimizer.state_dict()["states"].values()]
        assert all(state["exp_avg"].any() for state in states)


@settings
def test_states_and_weights_continue_in_another_engine(stage: int, more: dict[str, Any]) -> None:
    with late_link():
        engine = start(stage, more)
        for number in range(3):
            take_step(engine, number)
        engine.synchronize_parameters()
        other = start(stage, more)
        take_step(other, 0)  # an update is under way when the states are replaced
        other.load_state_dict(engine.state_dict())
        other.optimizer.load_state_dict(engine.optimizer.state_dict())
        for each in (engine, other):
            take_step(each, 3)
            each.synchronize_parameters()
        assert all(map(torch.equal, _weights(engine), _weights(other)))


# ---- what cannot be delayed ----


@pytest.mark.parametrize(
    ("offload", "optimizer", "message"),
    [
        ({"device": "none"}, "AdamW", 'delayed_update needs the optimizer in host memory, not "none"'),
        ({"device": "nvme", "nvme_path": "/x"}, "AdamW", 'delayed_update needs the optimizer in host memory, not "nvm'),
        ({"ratio": 0.5}, "AdamW", "delayed_update needs all of the optimizer in host memory, not 0.5 of it"),
        ({}, "Lamb", "delayed_update is not possible with Lamb"),
        ({}, "Muon", "delayed_update is not possible with Muon"),
        ({}, "RMSprop", "delayed_update is not possible with RMSprop"),
    ],
)
def test_a_config_that_cannot_be_is_refused(offload: dict[str, Any], optimizer: str, message: str) -> None:
    more = {"offload_optimizer": {**DELAYED, **offload}}
    with pytest.raises(ConfigError, match=message):
        start(2, more, optimizer={"type": optimizer, "params": {}})


def test_a_client_optimizer_without_a_kernel_is_refused() -> None:
    model = build("Plain")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 2, "offload_optimizer": DELAYED},
    }
    with pytest.raises(EngineError, match="delayed_update is not possible with RMSprop"):
        launcher.initialize(model=model, optimizer=torch.optim.RMSprop(model.parameters()), config=config)


def test_the_start_line_says_so() -> None:
    with logged() as lines:
        start(2, {"offload_optimizer": DELAYED})
    assert "offload: optimizer → cpu · updates one step late, from step 4 on" in "\n".join(lines)
