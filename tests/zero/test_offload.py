"""Optimizer and parameters in host memory: the same bits as without, whatever a script does in between.

Copies run as late as a GPU's may (`LateCopier`): what is read before it was waited for would be NaN.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from harness.logs import logged
from harness.train.collective import communicators
from harness.train.offload import LateCopier, is_in_host_memory, late_link
from harness.train.parity import RESTLESS_SCALE, Case, Trajectory, train_engine
from harness.train.ranks import run_on_ranks, run_once_on_ranks
from harness.train.zoo import LR, SAMPLES, WEIGHT_DECAY, batches, build
from torch import Tensor

import launcher
from launcher.base.errors import ConfigError, EngineError
from launcher.comm.streams import StreamEvent
from launcher.zero.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
)
from launcher.zero.gathered import GatheredParameters

HOST = {"device": "cpu"}
SHARDED = {"stage3_param_persistence_threshold": 0}
UNIT_NUMEL = 2500  # a block of the models: several units at every stage
OPTIMIZER = {"offload_optimizer": HOST}
PART = {"offload_optimizer": {**HOST, "ratio": 0.4}}
BOTH = {"offload_optimizer": HOST, "offload_param": HOST}
PARAMS = {"offload_param": HOST}
SETTINGS = [(1, OPTIMIZER), (2, OPTIMIZER), (2, PART), (3, OPTIMIZER), (3, BOTH), (3, PARAMS), (3, {**PART, **PARAMS})]
NAMES = ["1 optimizer", "2 optimizer", "2 part", "3 optimizer", "3 both", "3 parameters", "3 part and parameters"]


def named(*quick: str) -> Any:
    """Give a test these settings, and all of them in the soak."""
    params = [
        pytest.param(*setting, id=name, marks=[] if name in quick else pytest.mark.soak)
        for setting, name in zip(SETTINGS, NAMES, strict=True)
    ]
    return pytest.mark.parametrize(("stage", "offload"), params)


# Each setting is in one of the two, and what differs most in both.
ONE = named("1 optimizer", "2 part", "3 both", "3 parameters")
OTHER = named("2 optimizer", "3 optimizer", "3 both", "3 part and parameters")


def train_here(rank: int, world_size: int, case: Case, kind: str) -> Trajectory:
    with communicators(kind):
        return train_engine(rank, world_size, case)


def train_late(rank: int, world_size: int, case: Case, kind: str) -> Trajectory:
    with late_link():
        return train_here(rank, world_size, case, kind)


def assert_offload_changes_nothing(
    case: Case, offload: dict[str, Any], world_size: int, kind: str = "gloo"
) -> Trajectory:
    here = dataclasses.replace(case, unit_numel=UNIT_NUMEL)
    away = dataclasses.replace(here, zero={**case.zero, **offload})
    expected: Trajectory = run_once_on_ranks(world_size, train_here, here, kind)[0]
    found: Trajectory = run_on_ranks(world_size, train_late, away, kind)[0]
    assert found.losses == expected.losses
    assert found.scales == expected.scales
    if case.clipping:
        assert repr(found.grad_norms) == repr(expected.grad_norms)  # inf and NaN of skipped steps included
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())
    return found


def by_precision(*precisions: str, first: int) -> Any:
    """Give a test all settings with fp16, whose steps may be skipped, and with fp32 and bf16 in turn.

    In the soak it has all with all. first: 0 to begin with fp32, 1 with bf16.
    """
    params = [
        pytest.param(*setting, precision, id=f"{precision}-{name}", marks=[] if is_quick else pytest.mark.soak)
        for precision in precisions
        for number, (setting, name) in enumerate(zip(SETTINGS, NAMES, strict=True))
        for is_quick in [precision == "fp16" or (number + (precision == "bf16")) % 2 == first]
    ]
    return pytest.mark.parametrize(("stage", "offload", "precision"), params)


@by_precision("fp32", "bf16", "fp16", first=0)
def test_the_same_bits(stage: int, offload: dict[str, Any], precision: str) -> None:
    case = Case(stage, precision, accumulation=1, num_steps=8, fp16=RESTLESS_SCALE)
    found = assert_offload_changes_nothing(case, offload, world_size=2)
    if precision != "fp16":
        assert found.losses[-1] < found.losses[0]
    else:
        assert any(not math.isfinite(norm) for norm in found.grad_norms), "no step was skipped"


@by_precision("fp32", "bf16", first=1)  # the other settings of each
def test_the_same_bits_with_accumulation_and_unused_parameters(
    stage: int, offload: dict[str, Any], precision: str
) -> None:
    case = Case(stage, precision, accumulation=3, num_steps=4, unused=True)
    assert_offload_changes_nothing(case, offload, world_size=2)


@by_precision("fp32", "bf16", first=0)
def test_the_same_bits_alone(stage: int, offload: dict[str, Any], precision: str) -> None:
    # Alone nothing is sharded without offload: other units, whose norms are summed in another order.
    case = Case(stage, precision, accumulation=3 if precision == "fp32" else 1, num_steps=5, clipping=0.0)
    assert_offload_changes_nothing(case, offload, world_size=1)


@ONE
def test_sixteen_bit_masters_and_sums(stage: int, offload: dict[str, Any]) -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    case = Case(stage, "bf16", accumulation=2, num_steps=5, settings={"bf16": bf16})
    assert_offload_changes_nothing(case, offload, world_size=2)


# Each optimizer at two of the settings, and at all of them in the soak.
OTHERS = [
    pytest.param(name, *setting, marks=pytest.mark.soak if (number + place) % 3 == 2 else [])
    for number, name in enumerate(("Lamb", "Lion", "SGD", "Adagrad"))
    for place, setting in enumerate([(1, OPTIMIZER), (2, PART), (3, BOTH)])
]


@pytest.mark.parametrize(("name", "stage", "offload"), OTHERS)
def test_other_optimizers(name: str, stage: int, offload: dict[str, Any]) -> None:
    settings = {"optimizer": {"type": name, "params": {"lr": 1e-3}}}
    case = Case(stage, "bf16", accumulation=1, num_steps=4, settings=settings)
    assert_offload_changes_nothing(case, offload, world_size=2)


@pytest.mark.parametrize(("stage", "offload"), [(1, OPTIMIZER), (2, PART), (3, BOTH)])
def test_the_step_alone_knows_where_accumulation_ends(stage: int, offload: dict[str, Any]) -> None:
    case = Case(stage, "fp32", accumulation=1, num_steps=4, settings={"managed_gradient_accumulation": False})
    assert_offload_changes_nothing(case, offload, world_size=2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_threads_small_units_and_ordinary_memory(stage: int) -> None:
    offload = {"offload_optimizer": {**HOST, "cpuadam_cores_perc": 0.5, "pin_memory": False}}
    zero = {**SHARDED, "sub_group_size": 600, "round_robin_gradients": True}
    case = Case(stage, "fp32", accumulation=1, num_steps=4, zero=zero)
    assert_offload_changes_nothing(case, offload, world_size=2)


# ---- sums that cross the bus in 16 bits: of NCCL, which sums in the type that travels, and of one rank ----

LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 5e-3}}}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 5e-3}}}
IN_16_BITS: dict[str, tuple[Case, dict[str, Any]]] = {
    "2": (Case(2, "bf16", 1, num_steps=5), OPTIMIZER),
    "2, a part, some unused": (Case(2, "bf16", 1, num_steps=4, unused=True), PART),
    "3, accumulated": (Case(3, "bf16", 3, num_steps=3), BOTH),
    "3, overflows": (Case(3, "fp16", 1, num_steps=8, fp16=RESTLESS_SCALE), OPTIMIZER),
    "2, the step decides": (Case(2, "bf16", 2, settings={"managed_gradient_accumulation": False}), OPTIMIZER),
    "2, Lamb": (Case(2, "bf16", 1, num_steps=4, settings=LAMB), OPTIMIZER),
    "3, Muon": (Case(3, "bf16", 1, num_steps=3, settings=MUON), OPTIMIZER),
}


@pytest.mark.parametrize("name", IN_16_BITS)
def test_the_same_bits_of_16_bit_sums(name: str) -> None:
    assert_offload_changes_nothing(*IN_16_BITS[name], world_size=2, kind="nccl")


def _moved_bytes(
    rank: int, world_size: int, kind: str, accumulation: int, zero: dict[str, Any]
) -> tuple[list[float], list[float]]:
    """Return the bytes that go down and up in each of two steps, for each element that this rank owns."""
    moved: Counter[str] = Counter()

    class Counting(LateCopier):
        def copy(self, target: Tensor, source: Tensor) -> StreamEvent:
            moved["down" if is_in_host_memory(target) else "up"] += source.nbytes
            return super().copy(target, source)

    down, up = [], []
    with late_link(), mock.patch("launcher.comm.device.HostDeviceCopier", Counting), communicators(kind):
        config = {"gradient_accumulation_steps": accumulation, "bf16": {"enabled": True}}
        engine = start(world_size, 2, {**OPTIMIZER, **zero}, **config)
        owned = sum(len(unit.owned) for unit in engine._sharded.units)
        for _ in range(2):
            moved.clear()
            for x, y in batches(accumulation):
                part = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
                engine.backward(engine(x[part].bfloat16(), y[part].bfloat16()).float())
                engine.step()
            down.append(moved["down"] / owned)
            up.append(moved["up"] / owned)
    return down, up


@pytest.mark.parametrize(("kind", "world_size"), [("gloo", 1), ("nccl", 2)])
def test_a_16_bit_sum_crosses_the_bus_in_2_bytes(kind: str, world_size: int) -> None:
    """A further one is added to it on the device, and makes it fp32; 2 bytes go up for the parameters."""
    for accumulation, down, up in ((1, 2, 2), (2, 2 + 4, 2 + 2), (3, 2 + 4 + 4, 2 + 4 + 2)):
        for found in run_on_ranks(world_size, _moved_bytes, kind, accumulation, {}):
            assert found == ([down] * 2, [up] * 2)


def test_a_sum_with_more_bits_keeps_them() -> None:
    """gloo sums in fp32, and so are copies of the shards, each with a mean over its own ranks."""
    assert run_on_ranks(2, _moved_bytes, "gloo", 1, {}) == [([4, 4], [2, 2])] * 2
    copies = {"stage": 3, "mics_shard_size": 2}
    assert [down for down, _ in run_on_ranks(4, _moved_bytes, "nccl", 1, copies)] == [[4, 4]] * 4


def _names_of_bad_gradients(rank: int, world_size: int) -> list[str]:
    with late_link(), logged() as lines:
        engine = start(world_size, 2, OPTIMIZER, bf16={"enabled": True})
        x, y = batches(1)[0]
        hook = engine.module.blocks[1].up.weight.register_hook(lambda grad: grad.fill_(math.inf))
        engine.backward(engine(x.bfloat16(), y.bfloat16()).float())
        engine.step()
        hook.remove()
    return [line for line in lines if "skipped" in line]


def test_a_bad_gradient_in_16_bits_is_named() -> None:
    [[line]] = run_on_ranks(1, _names_of_bad_gradients)
    assert "first in blocks.1.up.weight" in line


# ---- units ----


def start(world_size: int, stage: int, offload: dict[str, Any], name: str = "Plain", **more: Any) -> Any:
    zero = {"stage": stage, **SHARDED, "reduce_bucket_size": UNIT_NUMEL, **offload}
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "steps_per_print": 0,
        "gradient_clipping": 0.1,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
        **more,
    }
    return launcher.initialize(model=build(name), config=config)[0]


def take_steps(engine: Any, rank: int, world_size: int, steps: range) -> None:
    part = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
    for x, y in batches(steps.stop)[steps.start :]:
        engine.backward(engine(x[part], y[part]))
        engine.step()


def _tiny_units(rank: int, world_size: int, stage: int, offload: dict[str, Any]) -> dict[str, Tensor]:
    with late_link():
        engine = start(world_size, stage, {**offload, "reduce_bucket_size": 1})
        if offload:
            assert all(is_in_host_memory(unit.grads.optimizer_grad) for unit in engine._sharded.units)
        take_steps(engine, rank, world_size, range(3))
        return engine.state_dict()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_units_of_which_a_rank_owns_only_padding(stage: int) -> None:
    expected = run_on_ranks(2, _tiny_units, stage, {})[0]
    for found in run_on_ranks(2, _tiny_units, stage, OPTIMIZER):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


# ---- what scripts do between steps ----


def _looks_and_writes(
    rank: int, world_size: int, stage: int, offload: dict[str, Any], kind: str
) -> list[Tensor | None]:
    with late_link(), communicators(kind):
        engine = start(world_size, stage, offload, "PartlyFrozen", bf16={"enabled": True})
        part = slice(rank * SAMPLES // 2, (rank + 1) * SAMPLES // 2)
        params = dict(engine.module.named_parameters())
        first, last = params["adapters.0.weight"], params["head.weight"]
        seen: list[Tensor | None] = [safe_get_full_optimizer_state(first, "exp_avg")]
        for number, (x, y) in enumerate(batches(5)):
            x, y = x[part].bfloat16(), y[part].bfloat16()
            engine.backward(engine(x, y).float())
            # Of the first units the sum is on its way still.
            seen += [safe_get_full_grad(first), safe_get_local_grad(first), safe_get_full_grad(last)]
            if number == 1:
                safe_set_full_grad(first, torch.full_like(seen[-3], 0.01))  # type: ignore[arg-type]
                safe_set_full_grad(last, 2 * seen[-1])  # type: ignore[operator]
            if number == 4 and stage > 1:
                for gradient in engine.optimizer.averaged_gradients[0]:
                    gradient.mul_(1 / 3)
            engine.step()
            seen += [safe_get_full_fp32_param(first), safe_get_local_fp32_param(last)]
            seen.append(safe_get_full_optimizer_state(last, "exp_avg_sq"))
            if number == 2:
                safe_set_full_fp32_param(first, 0.5 * seen[-3])  # type: ignore[operator]
                safe_set_full_optimizer_state(last, torch.zeros_like(last_state(seen)), "exp_avg_sq")
                if stage == 3:
                    safe_set_local_fp32_param(last, 0.5 * seen[-2])  # type: ignore[operator]
            if number == 3:
                with GatheredParameters([first, params["blocks.0.up.weight"], params["blocks.1.up.weight"]], 0):
                    if rank == 0:
                        first.data.mul_(1.5)
                        params["blocks.1.up.weight"].data.mul_(0.5)  # frozen
            engine.eval()
            with torch.no_grad():
                seen.append(engine(x, y).float())
            engine.train()
        return [*seen, *engine.state_dict().values()]


def last_state(seen: list[Tensor | None]) -> Tensor:
    assert seen[-1] is not None
    return seen[-1]


@pytest.mark.parametrize("kind", ["gloo", "nccl"])
@OTHER
def test_what_scripts_read_and_write_between_steps(stage: int, offload: dict[str, Any], kind: str) -> None:
    expected = run_once_on_ranks(2, _looks_and_writes, stage, {}, kind)
    for found, rank_expected in zip(run_on_ranks(2, _looks_and_writes, stage, offload, kind), expected, strict=True):
        for number, (value, other) in enumerate(zip(found, rank_expected, strict=True)):
            assert value is other is None or torch.equal(value, other), f"value {number}"  # type: ignore[arg-type]


def _writes_what_is_unused(rank: int, world_size: int, stage: int, offload: dict[str, Any]) -> list[Tensor]:
    """Load weights, then write one; step after each. Return the parameter that no rank uses after each of the steps."""
    with late_link():
        engine = start(world_size, stage, offload, "SomeUnused", bf16={"enabled": True})
        unused, seen = engine.module.blocks[2].extra, []
        part = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
        for number, (x, y) in enumerate(batches(3)):
            if number == 1:
                engine.load_state_dict({name: 2 * value for name, value in engine.state_dict().items()})
            if number == 2:
                with GatheredParameters([unused], 0):
                    unused.data.fill_(5.0 + rank)
            engine.backward(engine(x[part].bfloat16(), y[part].bfloat16()).float())
            engine.step()
            seen.append(engine.state_dict()["blocks.2.extra"])
        return seen


@ONE
def test_what_is_written_stays_where_a_step_leaves_it_out(stage: int, offload: dict[str, Any]) -> None:
    for seen in run_on_ranks(2, _writes_what_is_unused, stage, offload):
        assert [value.unique().tolist() for value in seen] == [[1.0], [2.0], [5.0]]


def _moves(rank: int, world_size: int, stage: int, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Tensor]:
    """Take two steps one way and two the other."""
    with late_link():
        first = start(world_size, stage, before, "SomeUnused")
        take_steps(first, rank, world_size, range(2))
        second = start(world_size, stage, after, "SomeUnused")
        second.load_state_dict(first.state_dict())
        second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        take_steps(second, rank, world_size, range(2, 4))
        return second.state_dict()


@OTHER
def test_a_run_moves_between_device_and_host(stage: int, offload: dict[str, Any]) -> None:
    stays = run_once_on_ranks(2, _moves, stage, {}, {})[0]
    for way in (({}, offload), (offload, {})):
        found = run_on_ranks(2, _moves, stage, *way)[0]
        assert all(torch.equal(found[name], value) for name, value in stays.items())


# ---- optimizers the engine has no kernel for ----


def _client(rank: int, world_size: int, stage: int, offload: dict[str, Any]) -> dict[str, Tensor]:
    with late_link():
        config = {
            "train_micro_batch_size_per_gpu": SAMPLES // world_size,
            "steps_per_print": 0,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, **SHARDED, "reduce_bucket_size": UNIT_NUMEL, **offload},
        }
        plain = build("Plain")
        optimizer = torch.optim.RMSprop(plain.parameters(), lr=1e-3)
        engine = launcher.initialize(model=plain, optimizer=optimizer, config=config)[0]
        take_steps(engine, rank, world_size, range(4))
        return engine.state_dict()


@ONE
def test_any_client_optimizer_that_runs_on_a_cpu(stage: int, offload: dict[str, Any]) -> None:
    expected, found = run_once_on_ranks(2, _client, stage, {})[0], run_on_ranks(2, _client, stage, offload)[0]
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_an_optimizer_without_a_kernel_is_an_error_first() -> None:
    model = build("Plain")
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, **OPTIMIZER}}
    expected = (
        "offload_optimizer: there is no kernel for RMSprop, so that torch's own RMSprop would run on the CPU"
        '.*accept that with "zero_force_ds_cpu_optimizer": false, or use AdamW'
    )
    with pytest.raises(EngineError, match=f"(?s){expected}"):
        launcher.initialize(model=model, optimizer=torch.optim.RMSprop(model.parameters()), config=config)


def test_a_stage_without_shards_cannot_offload() -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0, **OPTIMIZER}}
    with pytest.raises(ConfigError, match="needs stage 1, 2 or 3, not 0"):
        launcher.initialize(model=build("Plain"), config=config)


def test_the_start_line_says_what_goes_where() -> None:
    zero = {"stage": 3, **PART, **PARAMS}
    with logged() as lines:
        launcher.initialize(
            model=build("Plain"), config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        )
    assert "offload: 40% of the optimizer → cpu · parameters → cpu" in "\n".join(lines)
