"""1-bit Adam, 0/1 Adam and 1-bit LAMB: before compression the plain optimizer, after it the papers' algorithms."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from harness.logs import logged
from harness.train.lamb import PlainLamb
from harness.train.onebit import (
    BETAS,
    EPS,
    SAMPLES,
    Signs,
    data,
    make_net,
    recorded_signs,
    reference_adam,
    reference_lamb,
    reference_zero_one,
)
from harness.train.parity import limit
from harness.train.ranks import run_on_ranks
from torch import Tensor

import launcher
from launcher.base.errors import ConfigError, EngineError
from launcher.config.load import load_config
from launcher.optim.onebit.algorithms import is_exchange_step, is_variance_step

# Type -> params that compress after 3 steps.
EARLY: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 3},
    "ZeroOneAdam": {"var_update_scaler": 1, "var_freeze_step": 8, "local_step_scaler": 4, "local_step_clipper": 4},
    "OneBitLamb": {"freeze_step": 3},
}
NEVER = {
    "OneBitAdam": {},
    "ZeroOneAdam": {"var_update_scaler": 1000},
    "OneBitLamb": {"max_coeff": 0.3, "eps_inside_sqrt": True},
}
TYPES = pytest.mark.parametrize("name", EARLY)


def start(world_size: int, name: str, params: dict[str, Any], **more: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "steps_per_print": 0,
        "gradient_clipping": 0.0,
        "optimizer": {"type": name, "params": {"lr": 1e-2, "betas": list(BETAS), **params}},
        **more,
    }
    return launcher.initialize(model=make_net(), config=config)[0]


def run(engine: Any, rank: int, world_size: int, steps: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Take the steps; return the losses of this rank's parts."""
    part = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
    dtype, losses = engine.module.head.weight.dtype, []
    for x, y in steps:
        loss = engine(x[part].to(dtype), y[part].to(dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# ---- before compression ----


def _weights(rank: int, world_size: int, name: str, params: dict[str, Any], num_steps: int) -> dict[str, Tensor]:
    engine = start(world_size, name, params)
    run(engine, rank, world_size, data(num_steps))
    return engine.state_dict()


def _plain(name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    model = make_net().to(dtype)
    params = list(model.parameters())
    plain: Any = torch.optim.AdamW(params, lr=1e-2, betas=BETAS, weight_decay=0.1)
    if name == "OneBitLamb":
        plain = PlainLamb(params, lr=1e-2, weight_decay=0.1, most=0.3, betas=BETAS, eps=EPS, is_eps_inside_root=True)
    for x, y in data(6):
        model(x.to(dtype), y.to(dtype)).backward()
        plain.step()
        plain.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize("world_size", [1, 2])
@TYPES
def test_the_warm_up_is_the_plain_optimizer(name: str, world_size: int) -> None:
    expected, exact = _plain(name, torch.float32), _plain(name, torch.float64)
    for found in run_on_ranks(world_size, _weights, name, {"weight_decay": 0.1, **NEVER[name]}, 6):
        for key, value in expected.items():
            most = limit(2e-6, (value.double() - exact[key]).abs().max().item())
            torch.testing.assert_close(found[key], value, rtol=2e-5, atol=most, msg=key)


# ---- after it: against the algorithm written down for all ranks in one process ----


REFERENCES = {
    "OneBitAdam": (reference_adam, 9),
    "OneBitLamb": (reference_lamb, 9),
    "ZeroOneAdam": (reference_zero_one, 24),
}


def _compressed(rank: int, world_size: int, name: str, num_steps: int) -> tuple[dict[str, Tensor], list[Signs]]:
    with recorded_signs() as signs:
        return _weights(rank, world_size, name, EARLY[name], num_steps), signs


@pytest.mark.parametrize("world_size", [2, 4])
@TYPES
def test_compressed_steps_are_the_papers(name: str, world_size: int) -> None:
    """The reference follows the signs of elements near zero: there they hang on the last bits, so on the CPU."""
    reference, num_steps = REFERENCES[name]
    weights, seen = zip(*run_on_ranks(world_size, _compressed, name, num_steps), strict=True)
    trained = reference(list(seen), data(num_steps))
    assert trained.mean.num_exchanges == len(seen[0])
    expected = trained.models[0].state_dict()
    for found in weights:
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4, msg=key)


@pytest.mark.parametrize(("scaler", "expected"), [(1, [0, 1, 3, 7, 15]), (2, [0, 1, 2, 4, 6, 10, 14])])
def test_the_variance_is_updated_ever_more_rarely(scaler: int, expected: list[int]) -> None:
    assert [step for step in range(16) if is_variance_step(step, scaler)] == expected


def test_ranks_exchange_ever_more_rarely() -> None:
    assert [step for step in range(24) if is_exchange_step(step, 6, 3)] == [
        *(0, 1, 2, 3, 4, 5), *(7, 9, 11), *(14, 17), *(20, 23)
    ]  # fmt: skip


# ---- what ranks have in common ----

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}


def _after_each_step(rank: int, world_size: int, name: str, precision: str) -> list[list[Tensor]]:
    engine = start(world_size, name, EARLY[name], gradient_clipping=1.0, **PRECISIONS[precision])
    found = []
    for step in data(24):
        run(engine, rank, world_size, [step])
        unit = engine._sharded.units[0]
        found.append([unit.optimizer_state("exp_avg"), unit.params.master.clone(), unit.params.flat.clone()])
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
@TYPES
def test_momenta_and_weights_are_the_same_bits_on_every_rank(name: str, precision: str) -> None:
    first, second = run_on_ranks(2, _after_each_step, name, precision)
    differ = {
        step
        for step, (one, other) in enumerate(zip(first, second, strict=True))
        if not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    }
    assert differ == ({12, 14, 16, 17, 18, 20, 21, 22} if name == "ZeroOneAdam" else set())


def _curve(rank: int, world_size: int, name: str, params: dict[str, Any]) -> list[float]:
    engine = start(world_size, name, params, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}})
    return run(engine, rank, world_size, data(80))


@TYPES
def test_a_model_trains_as_well_as_without_compression(name: str) -> None:
    late = {"OneBitAdam": {"freeze_step": 25}, "OneBitLamb": {"freeze_step": 25}}.get(
        name, {"var_update_scaler": 8, "var_freeze_step": 35, "local_step_scaler": 16, "local_step_clipper": 4}
    )
    curves = [
        torch.tensor(run_on_ranks(2, _curve, name, {"lr": 5e-3, **params})).mean(0) for params in (late, NEVER[name])
    ]
    compressed, plain = (curve[-20:].mean().item() for curve in curves)
    assert compressed < 0.2 * curves[0][:5].mean()
    assert compressed < 1.5 * plain


# ---- bytes ----


def _said(rank: int, world_size: int, name: str) -> tuple[list[str], int]:
    with logged() as lines:
        engine = start(world_size, name, EARLY[name])
        run(engine, rank, world_size, data(6))
    return [line for line in lines if "compresses" in line], engine._sharded.units[0].numel


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.soak)])
@TYPES
def test_rank_0_says_what_is_saved(name: str, world_size: int) -> None:
    (said, numel), *others = run_on_ranks(world_size, _said, name)
    assert all(lines == [] for lines, _ in others)
    [line] = said
    step = 3 if name == "ZeroOneAdam" else 4
    found = re.fullmatch(
        rf"{name} compresses in step {step}: each rank sends ([\d,]+) bytes instead of ([\d,]+), ([\d.]+) times less",
        line,
    )
    assert found is not None
    after, before = (int(number.replace(",", "")) for number in found.groups()[:2])
    assert 0 <= before - 2 * (world_size - 1) * numel * 4 // world_size <= 100 * world_size  # scalars of the norm
    assert after < before / 15  # the runs of small parameters fill a block each here
    assert found[3] == f"{before / after:.1f}"


def _hears_nothing(rank: int, world_size: int) -> list[str]:
    return _said(rank, world_size, "OneBitAdam")[0]


def test_alone_there_is_nothing_to_say() -> None:
    assert run_on_ranks(1, _hears_nothing) == [[]]


# ---- norms, clipping, overflow ----


def _norms(rank: int, world_size: int, reduction: str) -> tuple[float, float]:
    """The norm of this rank's own gradient in a compressed step, and what the engine says."""
    engine = start(world_size, "OneBitAdam", {"freeze_step": 1}, gradient_allreduce_op=reduction)
    run(engine, rank, world_size, data(1))
    model = make_net()
    model.load_state_dict(engine.state_dict())
    x, y = (tensor.chunk(world_size)[rank] for tensor in data(2)[1])
    model(x, y).backward()
    own = sum(param.grad.square().sum().item() for param in model.parameters() if param.grad is not None) ** 0.5
    run(engine, rank, world_size, data(2)[1:])
    return own, engine.get_global_grad_norm()


@pytest.mark.parametrize(("reduction", "factor"), [("mean", 1.0), ("sum", 4.0)])
def test_the_norm_is_the_root_mean_square_of_the_ranks_own(reduction: str, factor: float) -> None:
    results = run_on_ranks(4, _norms, reduction)
    expected = factor * (sum(own**2 for own, _ in results) / 4) ** 0.5
    assert [norm for _, norm in results] == [pytest.approx(expected, rel=1e-5)] * 4


def _overflows(rank: int, world_size: int) -> tuple[int, bool, float]:
    """Rank 1 overflows in the second compressed step."""
    engine = start(world_size, "OneBitAdam", {"freeze_step": 2}, fp16={"enabled": True, "hysteresis": 1})
    run(engine, rank, world_size, data(3))
    before = copy.deepcopy(engine.optimizer.state_dict())
    x, y = data(4)[3]
    engine.backward(engine(x.half(), y.half()) * (1e30 if rank == 1 else 1.0))
    engine.step()
    after = engine.optimizer.state_dict()
    is_untouched = torch.equal(before["errors"]["worker"], after["errors"]["worker"])
    return engine.skipped_steps, is_untouched, engine.optimizer.cur_scale


def test_an_overflow_on_one_rank_skips_a_compressed_step_on_all() -> None:
    assert run_on_ranks(2, _overflows) == [(1, True, 2.0**15)] * 2


# ---- accumulation, parameters without gradient, states ----


def _accumulated(rank: int, world_size: int, in_two: bool) -> list[float]:
    """The gradient norms of a summed and a compressed step over two micro-batches, reduced once or after each."""
    norms = []
    engine = start(world_size, "OneBitAdam", {"freeze_step": 1}, gradient_accumulation_steps=2)
    for number, (x, y) in enumerate(data(4)):
        if in_two:
            engine.set_gradient_accumulation_boundary(True)
        part = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
        engine.backward(engine(x[part], y[part]))
        if number % 2 or not in_two:
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms[1::2]


def test_a_gradient_that_is_added_to_after_its_reduction_counts_once() -> None:
    again, once = (run_on_ranks(2, _accumulated, in_two) for in_two in (True, False))
    assert again[0] == again[1] == pytest.approx(once[0], rel=1e-5)


def _spare(rank: int, world_size: int, name: str) -> list[tuple[Tensor, Tensor, float]]:
    """The spare layer has gradients in the first three steps only."""
    engine = start(world_size, name, {**EARLY[name], "weight_decay": 0.1})
    found = []
    for number, step in enumerate(data(24)):
        engine.module.uses_spare = number < 3
        run(engine, rank, world_size, [step])
        [state] = [shard.state for shard in engine._sharded.units[0].shards if shard.name == "spare.weight"]
        found.append((engine.module.spare.weight.detach().clone(), state["exp_avg"].clone(), state["step"]))
    return found


@TYPES
def test_a_parameter_without_gradient_keeps_its_value_and_state(name: str) -> None:
    for found in run_on_ranks(2, _spare, name):
        weights, momenta, counts = zip(*found, strict=True)
        assert not torch.equal(weights[1], weights[2])
        assert all(torch.equal(weight, weights[2]) for weight in weights[3:])
        assert all(torch.equal(momentum, momenta[2]) for momentum in momenta[3:])
        assert counts == (1, 2, *[3] * 22)


def _continued(rank: int, world_size: int, name: str, num_before: int) -> bool:
    engine = start(world_size, name, EARLY[name])
    run(engine, rank, world_size, data(num_before))
    other = start(world_size, name, EARLY[name])
    run(other, rank, world_size, data(2))  # state that must be forgotten
    other.load_state_dict(engine.state_dict())
    other.optimizer.load_state_dict(engine.optimizer.state_dict())
    other.optimizer.load_state_dict(other.optimizer.state_dict())
    for one in (engine, other):
        run(one, rank, world_size, data(28)[num_before:])
    mine, theirs = engine.state_dict(), other.state_dict()
    return all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize(
    ("name", "num_before"),
    [*((name, number) for name in EARLY for number in (1, 6)), ("ZeroOneAdam", 15), ("ZeroOneAdam", 18)],
)
def test_a_state_continues_where_it_was(name: str, num_before: int) -> None:
    """In warm-up, compressed, and for 0/1 Adam while the ranks are apart."""
    assert run_on_ranks(2, _continued, name, num_before) == [True, True]


def test_a_state_of_another_optimizer_is_refused() -> None:
    engine, other = (start(1, name, {}) for name in ("OneBitAdam", "OneBitLamb"))
    with pytest.raises(EngineError, match="the optimizer state is of OneBitAdam"):
        other.optimizer.load_state_dict(engine.optimizer.state_dict())


def test_groups_differ_and_are_live() -> None:
    model = make_net()
    groups = [
        {"params": [p for n, p in model.named_parameters() if "bias" not in n]},
        {"params": [p for n, p in model.named_parameters() if "bias" in n], "lr": 0.0},
    ]
    config = {"train_micro_batch_size_per_gpu": SAMPLES, "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}}
    engine, optimizer, *_ = launcher.initialize(model=model, model_parameters=groups, config=config)
    before = engine.state_dict()
    run(engine, 0, 1, data(1))
    middle = engine.state_dict()
    optimizer.param_groups[0]["lr"] = 0.0
    run(engine, 0, 1, data(1))
    assert not torch.equal(before["head.weight"], middle["head.weight"])
    assert torch.equal(before["head.bias"], middle["head.bias"])
    assert torch.equal(engine.state_dict()["head.weight"], middle["head.weight"])


# ---- what is refused, and what is said to be without effect ----


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("OneBitAdam", {"zero_optimization": {"stage": 1}}, "OneBitAdam cannot run at ZeRO stage 1"),
        ("ZeroOneAdam", {"zero_optimization": {"stage": 2}}, "ZeroOneAdam cannot run at ZeRO stage 2"),
        ("OneBitLamb", {"zero_optimization": {"stage": 3}}, "OneBitLamb cannot run at ZeRO stage 3"),
        ("OneBitLamb", {"fp16": {"enabled": True, "loss_scale": 128}}, "OneBitLamb needs a dynamic loss scale"),
        (
            "OneBitAdam",
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
            "OneBitAdam needs fp32 masters",
        ),
        (
            "OneBitAdam",
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
            "OneBitAdam needs gradient sums in fp32",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_load(name: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({"optimizer": {"type": name}, **more})


@pytest.mark.parametrize("params", [{"freeze_step": 0}, {"amsgrad": True}, {"adam_w_mode": False}])
def test_parameters_that_make_no_sense_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(params))):
        load_config({"optimizer": {"type": "OneBitAdam", "params": params}})


def test_keys_of_other_backends_have_no_effect_and_the_name_may_have_any_case() -> None:
    loaded = load_config(
        {"optimizer": {"type": "onebitadam", "params": {"cuda_aware": True, "comm_backend_name": "mpi"}}}
    )
    assert loaded.config.optimizer is not None
    assert loaded.config.optimizer.type == "OneBitAdam"
    assert [notice.message.split(" ")[0] for notice in loaded.notices] == [
        "optimizer.params.cuda_aware",
        "optimizer.params.comm_backend_name",
    ]
