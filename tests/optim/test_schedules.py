"""Every schedule against its published formula, written out here a second time and by hand at key steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launcher.base.errors import ConfigError
from launcher.base.log import get_logger
from launcher.optim.schedules import LRSchedule, OneCycle, WarmupCosineLR, WarmupLR, build_schedule


def make(type_name: str, params: dict[str, Any], lr: float = 0.1, num_groups: int = 1) -> LRSchedule:
    return build_schedule(type_name, params, over({"lr": lr} for _ in range(num_groups)))


def over(groups: Iterable[dict[str, Any]]) -> SimpleNamespace:
    """Return what a schedule needs of an optimizer."""
    return SimpleNamespace(param_groups=list(groups))


def rates(schedule: LRSchedule, num_steps: int) -> list[float]:
    """Rates used by optimizer steps 0, 1, 2, ..."""
    values = []
    for _ in range(num_steps):
        values.append(schedule.get_last_lr()[0])
        schedule.step()
    return values


def test_warmup_linear_then_constant() -> None:
    params = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.11, "warmup_num_steps": 4, "warmup_type": "linear"}
    assert rates(make("WarmupLR", params), 7) == pytest.approx([0.01, 0.01, 0.035, 0.06, 0.085, 0.11, 0.11])


def test_warmup_log() -> None:
    used = rates(make("WarmupLR", {"warmup_max_lr": 1.0, "warmup_num_steps": 8}), 10)
    assert used[0] == 0.0
    assert used[1:] == pytest.approx([min(1.0, math.log(t + 1) / math.log(8)) for t in range(9)])


def test_warmup_max_lr_defaults_to_the_optimizers() -> None:
    schedule = make("WarmupLR", {"warmup_num_steps": 3, "warmup_type": "linear"}, lr=0.25)
    assert rates(schedule, 6)[-1] == 0.25


@pytest.mark.parametrize("warmup_num_steps", [0, 1])
def test_no_warmup_is_two_steps_not_a_division_by_zero(warmup_num_steps: int) -> None:
    assert rates(make("WarmupLR", {"warmup_num_steps": warmup_num_steps}), 4)[-1] == 0.1


def test_warmup_decay_reaches_its_minimum() -> None:
    params = {
        "total_num_steps": 10,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 1.0,
        "warmup_num_steps": 5,
        "warmup_type": "linear",
    }
    used = rates(make("WarmupDecayLR", params), 14)
    assert used == pytest.approx([0.0, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0, 0.0])


def test_warmup_cosine() -> None:
    params = {"total_num_steps": 12, "warmup_num_steps": 4, "cos_min_ratio": 0.1, "warmup_type": "linear"}
    used = rates(make("WarmupCosineLR", params, lr=2.0), 16)
    assert used[:5] == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.5])
    for t in range(4, 15):
        progress = min(1.0, (t - 3) / 8)
        assert used[t + 1] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2))
    assert used[-1] == pytest.approx(0.2)


def test_lr_range_test_by_hand() -> None:
    params = {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 4, "lr_range_test_step_rate": 2.0}
    assert rates(make("LRRangeTest", params), 6) == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3, 0.35])
    stairs = rates(make("LRRangeTest", {**params, "lr_range_test_staircase": True}), 10)
    assert stairs == pytest.approx([0.1] * 4 + [0.3] * 4 + [0.5] * 2)


CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4, "cycle_second_step_size": 2}


def test_one_cycle_by_hand() -> None:
    used = rates(make("OneCycle", CYCLE), 10)
    assert used == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.3, 0.1, 0.1, 0.1, 0.1])


def test_one_cycle_is_torchs_triangle() -> None:
    """Torch's CyclicLR is the same triangle, for ever; ours is compared within its first cycle."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    plain = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.02, 0.3, 7, 5, cycle_momentum=False)
    params = {
        "cycle_min_lr": 0.02,
        "cycle_max_lr": 0.3,
        "cycle_first_step_size": 7,
        "cycle_second_step_size": 5,
        "cycle_momentum": False,
    }
    expected = []
    for _ in range(12):
        expected.append(plain.get_last_lr()[0])
        optimizer.step()
        plain.step()
    assert rates(make("OneCycle", params), 12) == pytest.approx(expected)


def test_one_cycle_decays_after_the_cycle() -> None:
    """The published formula, written out: t counts from -1, S = 6, decay intervals of 2 steps."""
    schedule = make("OneCycle", {**CYCLE, "decay_step_size": 2, "decay_lr_rate": 0.5})
    used = rates(schedule, 12)
    for t in range(6, 11):
        assert used[t + 1] == pytest.approx(0.1 / (1 + 0.5 * (t - 6 + 1) / 2))


def test_one_cycle_stairs() -> None:
    used = rates(make("OneCycle", {**CYCLE, "cycle_first_stair_count": 2, "cycle_second_stair_count": 1}), 7)
    assert used == pytest.approx([0.1, 0.1, 0.3, 0.3, 0.5, 0.1, 0.1])


@pytest.mark.parametrize("has_betas", [True, False])
def test_one_cycle_moves_the_momentum_against_the_rate(has_betas: bool) -> None:
    group: dict[str, Any] = {"lr": 0.1, **({"betas": (0.9, 0.999)} if has_betas else {"momentum": 0.9})}
    params = {**CYCLE, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_step_size": 1, "decay_mom_rate": 0.01}
    schedule = build_schedule("OneCycle", params, over([group]))
    used = []
    for _ in range(9):
        used.append(group["betas"][0] if has_betas else group["momentum"])
        schedule.step()
    assert used == pytest.approx([0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.9 * 1.01, 0.9 * 1.02])
    if has_betas:
        assert group["betas"][1] == 0.99


def test_an_optimizer_without_momentum_keeps_none() -> None:
    groups: list[dict[str, Any]] = [{"lr": 0.1, "momentum": 0.0}]
    build_schedule("OneCycle", CYCLE, over(groups)).step()
    assert groups[0]["momentum"] == 0.0


def test_groups_keep_their_own_rates() -> None:
    groups: list[dict[str, Any]] = [{"lr": 1.0}, {"lr": 2.0}]
    schedule = build_schedule(
        "WarmupLR", {"warmup_min_lr": [0.1, 0.2], "warmup_num_steps": 2, "warmup_type": "linear"}, over(groups)
    )
    assert [group["lr"] for group in groups] == [0.1, 0.2]
    for _ in range(3):
        schedule.step()
    assert [group["lr"] for group in groups] == [1.0, 2.0]


def test_state_continues_where_it_was() -> None:
    params = {"total_num_steps": 50, "warmup_num_steps": 10}
    first, second = make("WarmupCosineLR", params), make("WarmupCosineLR", params)
    for _ in range(17):
        first.step()
    second.load_state_dict(first.state_dict())
    assert rates(first, 5) == rates(second, 5)


@pytest.mark.parametrize(
    ("type_name", "params", "message"),
    [
        ("WarmupLRR", {}, 'did you mean "WarmupLR"'),
        ("WarmupDecayLR", {}, "total_num_steps"),
        ("WarmupCosineLR", {"total_num_steps": 0}, "training of 0 steps"),
        ("WarmupLR", {"warmup_steps": 3}, "warmup_steps"),
        ("WarmupLR", {"warmup_num_steps": None}, "warmup_num_steps: expected an integer of at least 0, got null"),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": -5}, "warmup_num_steps: expected an integer"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size: expected an integer of at least 1"),
        ("OneCycle", {**CYCLE, "cycle_first_step_size": 0}, "cycle_first_step_size: expected an integer of at least 1"),
        ("OneCycle", {**CYCLE, "cycle_second_step_size": -1}, "cycle_second_step_size: expected an integer"),
        ("OneCycle", {**CYCLE, "cycle_min_lr": [0.1, 0.2]}, "cycle_min_lr has 2 values, and the optimizer 1 groups"),
    ],
)
def test_mistakes_are_named(type_name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(type_name, params)


def test_an_unknown_form_of_the_rise_is_said_and_logarithmic(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_logger(), "propagate", True)
    params = {"total_num_steps": 20, "warmup_num_steps": 8, "warmup_type": "lienar"}
    used = make("WarmupCosineLR", params)
    assert used.warmup_type == "log"  # type: ignore[attr-defined]
    assert rates(used, 15) == rates(make("WarmupCosineLR", {**params, "warmup_type": "log"}), 15)
    assert 'the warmup_type "lienar" is unknown, and "log" is used (did you mean "linear"?)' in caplog.text


def test_one_cycle_has_values_for_each_group() -> None:
    groups: list[dict[str, Any]] = [{"lr": 0.1, "betas": (0.9, 0.999)}, {"lr": 0.1, "betas": (0.9, 0.999)}]
    params = {
        **CYCLE,
        "cycle_min_lr": [0.1, 0.01],
        "cycle_max_lr": [0.5, 0.05],
        "cycle_min_mom": [0.8, 0.7],
        "cycle_max_mom": [0.9, 0.95],
    }
    schedule = build_schedule("OneCycle", params, over(groups))
    schedule.step(3)
    assert [group["lr"] for group in groups] == pytest.approx([0.5, 0.05])
    assert [group["betas"][0] for group in groups] == pytest.approx([0.8, 0.7])
    assert schedule.get_mom() == [(pytest.approx(0.8), 0.99), (pytest.approx(0.7), 0.99)]  # type: ignore[attr-defined]


def test_one_cycle_without_a_fall_ends_at_its_lowest() -> None:
    used = rates(make("OneCycle", {**CYCLE, "cycle_second_step_size": 0}), 6)
    assert used == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.1, 0.1])


def test_a_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    rate = torch.full((1,), 0.1, dtype=torch.float64)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    schedule = WarmupLR(optimizer, 0.0, 1.0, 4, "linear")
    schedule.step(2)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == schedule.get_lr()[0] == 0.5


def test_attributes_are_those_of_deepspeed() -> None:
    optimizer = torch.optim.Adam([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.1, 0.2)])
    warmup = WarmupLR(optimizer, warmup_num_steps=1)
    assert (warmup.min_lrs, warmup.max_lrs, warmup.warmup_num_steps) == ([0.0, 0.0], [0.1, 0.2], 2)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.1, 0.2
    cosine = WarmupCosineLR(optimizer, 100, warmup_num_steps=10)
    assert cosine.get_lr_ratio() == 0.0
    cosine.step(1)
    assert cosine.get_lr_ratio() == pytest.approx(math.log(2) / math.log(10))
    assert cosine.get_last_lr() == pytest.approx([0.1 * cosine.get_lr_ratio(), 0.2 * cosine.get_lr_ratio()])
    cycle = OneCycle(optimizer, 0.1, 0.2, cycle_first_step_size=10, cycle_second_step_size=0)
    assert (cycle.step_ratio, cycle.total_size, cycle.cycle_momentum) == (1.0, 10, True)
