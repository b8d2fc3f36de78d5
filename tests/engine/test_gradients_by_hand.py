"""What a script does to `param.grad` around the engine means what it means in a plain loop, or is one error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import pytest
import torch
from harness.train.behind import runs_behind_host
from harness.train.parity import weight_distance
from harness.train.ranks import run_on_ranks
from harness.train.zoo import LR, batches, build, engine_of
from torch import Tensor, nn

import launcher
from launcher.base.errors import EngineError

STEPS = 3
Params = Iterable[nn.Parameter]


# ---- without a backward ----


def _by_hand(rank: int, world_size: int, stage: int, precision: dict[str, dict[str, object]]) -> None:
    model = build("Plain")
    engine = launcher.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "SGD", "params": {"lr": LR}},
            "gradient_clipping": 0.0,
            **precision,
        },
    )[0]
    reference = build("Plain")
    optimizer = torch.optim.SGD(reference.parameters(), lr=LR)
    factor = engine.optimizer.cur_scale
    for number in range(STEPS):
        for param, plain_param in zip(model.parameters(), reference.parameters(), strict=True):
            plain_param.grad = torch.full_like(plain_param, 0.25 * (number + 1))
            param.grad = (plain_param.grad * factor).to(param.dtype)
        optimizer.step()
        engine.step()
    assert weight_distance(engine.state_dict(), dict(reference.state_dict())) < (1e-6 if not precision else 1e-2)
    assert engine.global_steps == STEPS
    with pytest.raises(EngineError, match="without a backward"):
        engine.step()
    engine.destroy()


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(0, {}), (1, {}), (2, {}), (0, {"bf16": {"enabled": True}}), (0, {"fp16": {"enabled": True, "loss_scale": 64}})],
)
def test_gradients_set_without_a_backward_are_those_of_the_step(
    stage: int, precision: dict[str, dict[str, object]]
) -> None:
    _by_hand(0, 1, stage, precision)


# ---- between backward and step ----


def _clip(params: Params) -> None:
    torch.nn.utils.clip_grad_norm_(params, 0.05)


def _clip_values(params: Params) -> None:
    torch.nn.utils.clip_grad_value_(params, 0.01)


def _scale(params: Params) -> None:
    for number, param in enumerate(params):
        if param.grad is not None:
            param.grad.mul_(number)


def _mask_the_data(params: Params) -> None:
    for param in params:
        if param.grad is not None:
            param.grad.data[..., ::2] = 0.0


def _surgery(params: Params) -> None:
    for number, param in enumerate(params):
        if number % 3 == 0 and param.grad is not None:
            param.grad = param.grad * 2 - 0.01


def _replace(params: Params) -> None:
    for number, param in enumerate(params):
        if number % 3 == 0:
            param.grad = torch.full_like(param, 0.1 * (number + 1))


def _take_away(params: Params) -> None:
    for number, param in enumerate(params):
        if number % 2:
            param.grad = None


READS = (_clip, _clip_values, _scale, _mask_the_data, _surgery)
WRITES = (_replace, _take_away)


def plain(change: Callable[[Params], None], micro_batches: int = 1, name: str = "Plain") -> dict[str, Tensor]:
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    data = iter(batches(STEPS * micro_batches))
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            (model(*next(data)) / micro_batches).backward()
        change(model.parameters())
        optimizer.step()
    return dict(model.state_dict())


def _train(
    rank: int,
    world_size: int,
    stage: int,
    change: Callable[[Params], None],
    micro_batches: int,
    name: str,
    clipping: float,
) -> dict[str, Tensor]:
    more = {"gradient_accumulation_steps": micro_batches, "gradient_clipping": clipping}
    engine = engine_of(build(name), stage, world_size, **more)
    for x, y in batches(STEPS * micro_batches):
        engine.backward(engine(x.chunk(world_size)[rank], y.chunk(world_size)[rank]))
        if engine.is_gradient_accumulation_boundary():
            change(engine.module.parameters())
        engine.step()
        assert all(param.grad is None for param in engine.module.parameters())
    return engine.state_dict()


@pytest.mark.parametrize("change", READS)
@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (3, 1)])
def test_whole_gradients_are_there_between_backward_and_step(
    stage: int, world_size: int, change: Callable[[Params], None]
) -> None:
    expected = plain(change, 2)
    for weights in run_on_ranks(world_size, _train, stage, change, 2, "Plain", 0.0):
        assert weight_distance(weights, expected) <= 2e-6


def _train_behind(rank: int, world_size: int, stage: int, change: Callable[[Params], None]) -> dict[str, Tensor]:
    with runs_behind_host():
        return _train(rank, world_size, stage, change, 2, "SomeUnused", 0.0)


@pytest.mark.parametrize(("stage", "change"), [(0, _scale), (0, _replace), (2, _replace), (2, _take_away)])
def test_the_same_where_the_host_runs_ahead_of_the_device(stage: int, change: Callable[[Params], None]) -> None:
    expected = plain(change, 2, "SomeUnused")
    for weights in run_on_ranks(2, _train_behind, stage, change):
        assert weight_distance(weights, expected) <= 2e-6


@pytest.mark.parametrize("change", WRITES)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_gradient_that_is_set_replaces_the_sum(stage: int, change: Callable[[Params], None]) -> None:
    expected = plain(change, 2, "SomeUnused")
    for weights in run_on_ranks(2, _train, stage, change, 2, "SomeUnused", 0.0):
        assert weight_distance(weights, expected) <= 2e-6


def _scale_and_clip(params: Params) -> None:
    params = list(params)
    _mask_the_data(params)
    torch.nn.utils.clip_grad_norm_(params, 0.02)


def test_the_engine_clips_what_was_written() -> None:
    expected = plain(_scale_and_clip)
    for weights in run_on_ranks(2, _train, 0, _mask_the_data, 1, "Plain", 0.02):
        assert weight_distance(weights, expected) <= 2e-6


def _read_what_is_not_there(rank: int, world_size: int, stage: int, precision: str) -> None:
    engine = engine_of(build("Plain"), stage, world_size, bf16={"enabled": precision == "bf16"})
    x, y = (tensor.chunk(world_size)[rank].to(next(engine.module.parameters()).dtype) for tensor in batches(1)[0])
    for change in READS:
        engine.backward(engine(x, y))
        with pytest.raises(EngineError, match=r"param\.grad was used .*safe_get_full_grad.*gradient_clipping"):
            change(engine.module.parameters())
        engine.step()
    assert engine.global_steps == len(READS)


@pytest.mark.parametrize(("stage", "precision"), [(0, "bf16"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (3, "bf16")])
def test_reading_a_gradient_that_no_rank_has_is_an_error(stage: int, precision: str) -> None:
    run_on_ranks(2, _read_what_is_not_there, stage, precision)


def _set_in_a_way_that_cannot_count(rank: int, world_size: int, stage: int, how: str) -> None:
    engine = engine_of(build("Plain"), stage, world_size, gradient_accumulation_steps=2)
    weight = engine.module.blocks[1].up.weight
    for micro, (x, y) in enumerate(batches(2)):
        engine.backward(engine(x.chunk(world_size)[rank], y.chunk(world_size)[rank]))
        if how == "on_one_rank" and micro == 1 and rank == 1:
            weight.grad = torch.ones_like(weight)
        elif how == "unlike" and micro == 1:
            weight.grad = torch.full_like(weight, rank)
        elif (how == "early" and micro == 0) or (how == "at_stage_3" and micro == 1):
            weight.grad = torch.ones_like(weight)
        elif how == "between" and micro == 1:
            weight.grad = torch.ones_like(weight)
            with pytest.raises(EngineError, match=r"param\.grad was set.*safe_set_full_grad"):
                launcher.zero.safe_get_full_grad(weight)
            engine.zero_grad()
            return
        if micro == 0:
            engine.step()
    with pytest.raises(EngineError, match=r"param\.grad of blocks\.1\.up\.weight was set .*safe_set_full_grad"):
        engine.step()


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        (0, "on_one_rank"),
        (2, "on_one_rank"),
        (0, "unlike"),
        (1, "unlike"),
        (2, "early"),
        (3, "at_stage_3"),
        (1, "between"),
    ],
)
def test_a_gradient_that_cannot_replace_the_sum_is_an_error_on_every_rank(stage: int, how: str) -> None:
    run_on_ranks(2, _set_in_a_way_that_cannot_count, stage, how)


# ---- hooks ----


def _halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def _no_change(params: Params) -> None:
    """Leave gradients as they are."""


def _train_with_hooks(rank: int, world_size: int, stage: int) -> dict[str, Tensor]:
    engine = engine_of(build("Plain"), stage, world_size, gradient_accumulation_steps=2)
    for param in engine.module.parameters():
        param.register_post_accumulate_grad_hook(_halve)
    for x, y in batches(2 * STEPS):
        engine.backward(2 * engine(x.chunk(world_size)[rank], y.chunk(world_size)[rank]))
        engine.step()
    return engine.state_dict()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_hook_that_was_registered_later_sees_the_gradient(stage: int) -> None:
    expected = plain(_no_change, 2)
    for weights in run_on_ranks(2, _train_with_hooks, stage):
        assert weight_distance(weights, expected) <= 2e-6


# ---- with other passes between ----


def _train_with_passes_between(rank: int, world_size: int, stage: int) -> dict[str, Tensor]:
    """A critic whose gradients get what another engine's loss leaves, and a forward between backward and step."""
    critic, generator = engine_of(build("Plain"), stage, world_size), engine_of(build("NoList"), stage, world_size)
    for x, y in batches(STEPS):
        x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
        critic.backward(critic(x, y))
        if stage < 3:  # a further forward between
            critic(x, y)
            generator.backward(critic.module(generator.module.first(x), y))
        gradient = critic.module.blocks[0].scale.grad
        assert gradient is not None
        if stage == 0:
            _scale(critic.module.parameters())
        else:
            with pytest.raises(EngineError, match=r"param\.grad was used"):
                gradient.norm()
        critic.step()
        with pytest.raises(EngineError, match="reached parameters of an engine"):
            critic.module(x, y).backward()
    return critic.state_dict()


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_are_those_of_the_own_loss(stage: int) -> None:
    expected = plain(_scale if stage == 0 else _no_change)
    for weights in run_on_ranks(2, _train_with_passes_between, stage):
        assert weight_distance(weights, expected) <= 2e-6


def _backward_outside(rank: int, world_size: int, stage: int) -> None:
    engine = engine_of(build("Plain"), stage, world_size)
    x, y = (tensor.chunk(world_size)[rank] for tensor in batches(1)[0])
    engine.backward(engine(x, y))
    with pytest.raises(EngineError, match="reached parameters of an engine"):
        engine.module(x, y).backward()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_backward_outside_is_an_error_between_backward_and_step_too(stage: int) -> None:
    run_on_ranks(2, _backward_outside, stage)


# ---- between micro-batches ----


def _sums_so_far(rank: int, world_size: int, stage: int, is_synchronized: bool) -> None:
    engine = engine_of(build("Plain"), stage, world_size, gradient_accumulation_steps=3)
    plain_model = build("Plain")
    weight, expected = engine.module.head.weight, plain_model.head.weight
    for x, y in batches(3):
        with contextlib.nullcontext() if is_synchronized else engine.no_sync():
            engine(x.chunk(world_size)[rank], y.chunk(world_size)[rank]).backward()
        (plain_model(x, y) / 3).backward()
        assert expected.grad is not None
        if world_size == 1:
            torch.testing.assert_close(weight.grad, expected.grad)
        found = launcher.zero.safe_get_full_grad(weight)
        torch.testing.assert_close(found, expected.grad)
        if is_synchronized:
            engine.step()


@pytest.mark.parametrize(
    ("stage", "world_size", "is_synchronized"),
    [(0, 1, True), (0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False), (2, 2, True), (3, 1, True), (3, 2, True)],
)
def test_the_sum_so_far_is_there_between_micro_batches(stage: int, world_size: int, is_synchronized: bool) -> None:
    run_on_ranks(world_size, _sums_so_far, stage, is_synchronized)
