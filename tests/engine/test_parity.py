"""Every stage, precision, accumulation and world size equals a plain single-process loop."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from harness.train.parity import (
    RESTLESS_SCALE,
    Case,
    Trajectory,
    check_fp32,
    limit,
    train_engine,
    train_fp32,
    train_mixed,
    worst_relative,
)
from harness.train.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def of_each_pair(remainder: int) -> Any:
    """Give a test stage, accumulation and world size: each two of them together, and all three in the soak."""
    settings = itertools.product((0, 1, 2, 3), (0, 1), (0, 1, 2))
    params = [
        pytest.param(stage, (1, 3)[micro], (1, 2, 4)[world], marks=[] if is_quick else pytest.mark.soak)
        for stage, micro, world in settings
        for is_quick in [(stage + micro + world) % 2 == remainder]
    ]
    return pytest.mark.parametrize(("stage", "accumulation", "world_size"), params)


def train(world_size: int, case: Case) -> Trajectory:
    """Train on ranks and check that all of them end with the same bits."""
    results: list[Trajectory] = run_on_ranks(world_size, train_engine, case)
    for other in results[1:]:
        assert other.losses == results[0].losses
        assert all(torch.equal(other.weights[name], weight) for name, weight in results[0].weights.items())
    return results[0]


def assert_same_bits(found: Trajectory, expected: Trajectory) -> None:
    assert found.losses == expected.losses
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())


@of_each_pair(0)
def test_fp32_equals_the_plain_loop(stage: int, accumulation: int, world_size: int) -> None:
    case = Case(stage, precision="fp32", accumulation=accumulation, num_steps=6)
    found = train(world_size, case)
    expected = check_fp32(found, case)
    assert_same_bits(found, train_mixed(case, world_size, found.grad_norms))  # the same sums in the same order
    assert expected.losses[-1] < 0.9 * expected.losses[0], "a run that learns nothing proves nothing"


@of_each_pair(1)
def test_bf16_equals_the_mixed_precision_loop(stage: int, accumulation: int, world_size: int) -> None:
    case = Case(stage, precision="bf16", accumulation=accumulation, num_steps=6)
    found = train(world_size, case)
    expected = train_mixed(case, world_size, found.grad_norms)
    assert found.weights["embedding.weight"].dtype == torch.bfloat16
    assert_same_bits(found, expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_many_steps_of_three_ranks_whose_shares_are_uneven(stage: int) -> None:
    """Neither parameters nor units divide by three, and the mean over three ranks rounds."""
    case = Case(stage, precision="fp32", accumulation=1, num_steps=10, batch=6, unit_numel=700)
    check_fp32(train(3, case), case)
    short = Case(stage, precision="bf16", accumulation=2, num_steps=6, batch=6, unused=True)
    found = train(3, short)
    assert_same_bits(found, train_mixed(short, 3, found.grad_norms))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clipping_only_makes_gradients_smaller(stage: int) -> None:
    case = Case(stage, precision="fp32", accumulation=1, clipping=9.0)
    expected = check_fp32(train(2, case), case)
    assert min(expected.grad_norms) < 0.9 * case.clipping
    assert max(expected.grad_norms) > 1.1 * case.clipping


FP16 = {
    "restless": RESTLESS_SCALE,
    "no hysteresis": {**RESTLESS_SCALE, "hysteresis": 1},
    "fixed": {"loss_scale": 1000},  # no power of two: unscaling rounds
}


@pytest.mark.parametrize(
    ("name", "world_size", "accumulation"), [("restless", 2, 3), ("restless", 1, 1), ("fixed", 4, 1)]
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_equals_the_mixed_precision_loop(stage: int, name: str, world_size: int, accumulation: int) -> None:
    case = Case(stage, precision="fp16", accumulation=accumulation, fp16=FP16[name], unused=accumulation > 1)
    found = train(world_size, case)
    expected = train_mixed(case, world_size, found.grad_norms)
    assert found.weights["embedding.weight"].dtype == torch.float16
    assert found.scales == expected.scales
    assert_same_bits(found, expected)
    if name != "fixed":
        assert sum(not math.isfinite(norm) for norm in found.grad_norms) >= 3
        assert any(later > earlier for earlier, later in itertools.pairwise(found.scales))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_neither_unit_size_nor_overlap_changes_the_result(stage: int) -> None:
    case = Case(stage, precision="fp32", accumulation=2, num_steps=6)
    whole, plain, exact = train(2, case), train_fp32(case), train_fp32(case, dtype=torch.float64)
    rounding = worst_relative(plain.losses, exact.losses)
    for other in (dataclasses.replace(case, unit_numel=700), dataclasses.replace(case, overlap=False)):
        assert worst_relative(train(2, other).losses, whole.losses) <= limit(1e-6, rounding)
