"""The Triton kernels against the reference; `test_triton.py` runs this file in a process of its own.

With TRITON_INTERPRET=1 everything runs interpreted, on the CPU; else compiled, on the GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.train.shards import full_shard
from harness.train.spans import RULES, Shard, check_rounded, check_update, random_shard
from torch import Tensor, nn

from launcher.comm.groups import world_group
from launcher.engine import optimizer_plan
from launcher.kernels import program_shape, triton_device, triton_kernels
from launcher.kernels.api import Adam, DeviceScale, Lamb, Lion, Rule, Sgd, Span
from launcher.kernels.check import SpanTypes, edits_problem, norm_problem, update_problem
from launcher.kernels.program_shape import CANDIDATES, ProgramShape
from launcher.kernels.reference import ReferenceKernel
from launcher.kernels.triton_kernels import TritonKernel
from launcher.optim.factory import plan_from_config

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
BLOCK_NUMEL = 128
SHAPE = ProgramShape(BLOCK_NUMEL, 4)
# 1,000 in all. LAMB has two passes and takes the interpreter three times as long.
NUM_CASES = {kind: 100 if kind is Lamb else 225 for kind in RULES}
NUM_QUICK_CASES = 6  # of these; the others only in a soak
ADAM = Adam(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=3)
LAMB = Lamb(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, step=3)
SGD = Sgd(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, is_nesterov=False, is_first=False)
only_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="there is nothing to see in the interpreter")


@pytest.fixture(scope="module")
def kernel() -> TritonKernel:
    return TritonKernel(SHAPE)


@pytest.fixture(autouse=True)
def no_numpy_warnings() -> Iterator[None]:
    """Numpy, which the interpreter computes with, warns of every inf and NaN."""
    with np.errstate(all="ignore"):
        yield


class Launches:
    """Stands in for a kernel and counts how often it is launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.count = kernel, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.count += 1
        return self.kernel[grid]


def adam_shard(lengths: list[int], rules: list[Rule] | None = None) -> Shard:
    """Lay spans of these lengths one after the other."""
    generator = torch.Generator().manual_seed(0)
    stops = np.cumsum(lengths).tolist()
    tensors = [torch.randn(stops[-1], generator=generator) for _ in range(4)]
    ranges = list(zip([0, *stops], stops, strict=False))
    rules = rules or [ADAM] * len(lengths)
    return Shard(ranges, rules, tensors[0], tensors[1], (tensors[2], tensors[3].square()), tensors[0].bfloat16())


# ---- parity ----


@pytest.mark.parametrize("is_quick", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["quick", "rest"])
@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_random_shards(kernel: TritonKernel, kind: type[Rule], is_quick: bool) -> None:
    for seed in range(NUM_QUICK_CASES) if is_quick else range(NUM_QUICK_CASES, NUM_CASES[kind]):
        try:
            check_update(kernel, random_shard(kind, seed, BLOCK_NUMEL), DEVICE, grad_scale=[1.0, 0.25, 1 / 3][seed % 3])
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_every_length_of_a_tail_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(triton_device.update)
    monkeypatch.setattr(triton_device, "update", launches)
    rules = [replace(ADAM, lr=0.001 * number, is_decoupled=number % 2 == 0) for number in range(35)]
    check_update(TritonKernel(ProgramShape(16, 4)), adam_shard(list(range(35)), [*rules]), DEVICE, 0.5)
    assert launches.count == 1


def test_spans_of_other_dtypes_cost_a_launch_of_their_own(
    kernel: TritonKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = [random_shard(Lamb, seed, BLOCK_NUMEL) for seed in range(8)]
    truth, taken = [shard.to("cpu") for shard in shards], [shard.to(DEVICE) for shard in shards]
    launches = Launches(triton_device.lamb_moments)
    monkeypatch.setattr(triton_device, "lamb_moments", launches)
    sums = kernel.lamb_moments([span for shard in taken for span in shard.spans()])
    assert 1 < launches.count <= len(shards)
    expected = ReferenceKernel().lamb_moments([span for shard in truth for span in shard.spans()])
    torch.testing.assert_close(sums.cpu(), expected, rtol=1e-6, atol=0, equal_nan=True)


def every_number(dtype: torch.dtype) -> Tensor:
    """Return every 16-bit pattern as fp32: exactly, just beside it, at the tie with its neighbour, just beside that."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    low_bits = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    return (numbers.view(torch.int32)[:, None] | low_bits).flatten().view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_differs_from_the_rounded_master_is_taken_over(kernel: TritonKernel, dtype: torch.dtype) -> None:
    master = every_number(dtype)
    values = master.to(dtype)
    values[::7], values[::11], values[::1001] = 0.5, -0.0, torch.nan
    expected = torch.where(values != master.to(dtype), values.float(), master)
    taken = torch.cat([master, torch.ones(3)]).to(DEVICE)
    TritonKernel(ProgramShape(16384, 4)).take_edits(taken[:-3], values.to(DEVICE))
    is_nan = expected.isnan()
    assert torch.equal(taken.cpu()[:-3].isnan(), is_nan)
    assert torch.equal(taken.cpu()[:-3][~is_nan].view(torch.int32), expected[~is_nan].view(torch.int32))
    assert taken[-3:].tolist() == [1.0] * 3
    assert edits_problem(kernel.take_edits, dtype, torch.device(DEVICE)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even_bit_by_bit(kernel: TritonKernel, dtype: torch.dtype) -> None:
    master = every_number(dtype)
    taken, zeros = master.to(DEVICE), torch.zeros_like(master, device=DEVICE)
    param = torch.zeros_like(master, dtype=dtype, device=DEVICE)
    TritonKernel(ProgramShape(16384, 4)).update([Span(replace(SGD, momentum=0.0), taken, zeros, (), param)])
    expected = master.to(dtype)
    is_nan = expected.isnan()
    assert torch.equal(param.cpu().isnan(), is_nan)
    assert torch.equal(param.cpu()[~is_nan].view(torch.int16), expected[~is_nan].view(torch.int16))


def test_the_first_momentum_is_the_gradient_whatever_stands_there(kernel: TritonKernel) -> None:
    master, grad = torch.ones(5, device=DEVICE), torch.full((5,), 2.0, device=DEVICE)
    buffer = torch.full((5,), float("nan"), device=DEVICE)
    kernel.update([Span(replace(SGD, is_first=True), master, grad, (buffer,))])
    assert buffer.tolist() == [2.0] * 5
    assert master.tolist() == pytest.approx([0.8] * 5)


def test_a_weight_that_is_not_finite_stays_out_of_the_moments(kernel: TritonKernel) -> None:
    shard = adam_shard([40], [replace(ADAM, is_decoupled=False, weight_decay=0.0)])
    shard.master[3] = float("inf")
    check_update(kernel, shard, DEVICE, 1.0)


# ---- norms ----


@pytest.mark.parametrize("seed", range(5))
def test_sum_of_squares(kernel: TritonKernel, seed: int) -> None:
    grads = [span.grad for number in (seed, seed + 100) for span in random_shard(Lion, number, BLOCK_NUMEL).spans()]
    total = kernel.sum_of_squares([grad.to(DEVICE) for grad in grads])
    assert total.dtype == torch.float64
    assert total.shape == ()
    assert total.device.type == DEVICE
    torch.testing.assert_close(total.cpu(), ReferenceKernel().sum_of_squares(grads), rtol=1e-12, atol=0, equal_nan=True)


def test_squares_do_not_overflow_early_and_sums_are_the_same_every_time(kernel: TritonKernel) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(numel, generator=generator).to(DEVICE) * 1e37 for numel in (1000, 7)]
    totals = {kernel.sum_of_squares(grads).item() for _ in range(3)}
    assert len(totals) == 1
    assert 1e74 < totals.pop() < float("inf")
    assert kernel.sum_of_squares([torch.zeros(0, device=DEVICE)]).item() == 0


BAD = [(0, 0, 0.0), (0, 15, torch.inf), (0, 16, torch.nan), (2, 0, -torch.inf), (2, 32, torch.nan), (4, 99, torch.inf)]


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 5, (torch.bfloat16,) * 5, (torch.float32, torch.float16) * 3])
def test_the_first_gradient_that_is_not_finite(dtypes: tuple[torch.dtype, ...]) -> None:
    kernel = TritonKernel(ProgramShape(16, 4))
    numels = (17, 0, 33, 5, 100)
    for number, (index, element, value) in enumerate(BAD):
        grads = [torch.ones(numel, dtype=dtype) for numel, dtype in zip(numels, dtypes, strict=False)]
        for later_index, later, other in BAD[number:]:
            grads[later_index][later] = other
        total, place = kernel.measure([grad.to(DEVICE) for grad in grads])
        expected_total, expected = ReferenceKernel().measure(grads)
        assert place.tolist() == expected.tolist() == ([index, element] if value else [0, 15])
        assert (total.isfinite().item(), expected_total.isfinite().item()) == (False, False)
    clean = [torch.ones(numel, device=DEVICE) for numel in numels]
    total, place = kernel.measure(clean)
    assert (total.item(), place.tolist()) == (sum(numels), [-1, -1])
    assert kernel.measure([clean[1]])[1].tolist() == [-1, -1]


def test_norms_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "CHUNK_NUMEL", 4)
    # Without an epsilon what lies behind a tail is 0 / 0.
    shard = adam_shard([16 * 9 + 1, 0, 3], [replace(LAMB, eps=0.0)] * 3)
    sums = TritonKernel(ProgramShape(16, 4)).lamb_moments(shard.to(DEVICE).spans())
    torch.testing.assert_close(sums.cpu(), ReferenceKernel().lamb_moments(shard.spans()), rtol=1e-6, atol=0)
    assert sums[1].tolist() == [0, 0]


# ---- a scale that only the device knows ----


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_a_scale_of_the_device(kernel: TritonKernel, kind: type[Rule]) -> None:
    shard = random_shard(kind, 3, BLOCK_NUMEL)
    known, unknown, skipped = (shard.to(DEVICE) for _ in range(3))
    kernel.update(known.spans(), 0.25)
    for taken, skip in ((unknown, 0.0), (skipped, 1.0)):
        kernel.update(taken.spans(), DeviceScale(torch.tensor(0.25, device=DEVICE), torch.tensor(skip, device=DEVICE)))
    for found, expected in ((unknown, known), (skipped, shard.to(DEVICE))):
        for mine, truth in zip((found.master, *found.states), (expected.master, *expected.states), strict=True):
            torch.testing.assert_close(mine, truth, rtol=0, atol=0, equal_nan=True)


def test_the_check_at_start_accepts_these_kernels_and_no_changed_ones(kernel: TritonKernel) -> None:
    device = torch.device(DEVICE)
    assert norm_problem(kernel, device) is None
    assert update_problem(kernel, ADAM, 2, SpanTypes(grad=torch.bfloat16, param=torch.bfloat16), device) is None

    class OneBlockOnly(TritonKernel):
        """As if the compiler had dropped all programs but the first."""

        def _launch(self, kernel: Any, part: Any, tables: Any, *arguments: Any, **constants: Any) -> None:
            if tables.block_spans.numel() > 1 and kernel is not self._code.sum_of_squares:
                tables = replace(tables, block_spans=tables.block_spans[:1])
            super()._launch(kernel, part, tables, *arguments, **constants)

    assert "computes other steps" in str(update_problem(OneBlockOnly(SHAPE), ADAM, 2, SpanTypes(), device))


# ---- the shape of programs ----


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_every_shape_writes_the_same_bits(kind: type[Rule]) -> None:
    shard = random_shard(kind, 5, 3000)
    taken = [shard.to(DEVICE) for _ in CANDIDATES]
    for shape, found in zip(CANDIDATES, taken, strict=True):
        TritonKernel(shape).update(found.spans(), 0.5)
    for found in taken[1:]:
        for mine, first in zip((found.master, *found.states), (taken[0].master, *taken[0].states), strict=True):
            torch.testing.assert_close(mine, first, rtol=0, atol=0, equal_nan=True)


def test_updates_take_the_fastest_shape_and_norms_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, int]] = []
    kernel = TritonKernel()
    launch = kernel._launch

    def noting(code: Any, part: Any, tables: Any, *arguments: Any, **constants: Any) -> None:
        launched.append((code.__name__, tables.shape.block_numel))
        launch(code, part, tables, *arguments, **constants)

    def seconds(update: Callable[[], None]) -> float:
        update()
        return 1 / launched[-1][1]  # the largest programs are the fastest

    monkeypatch.setattr(kernel, "_launch", noting)
    monkeypatch.setattr(triton_kernels, "median_update_s", seconds)
    monkeypatch.setattr(program_shape, "_MEASURED_NUMEL", 3000)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
    types = SpanTypes(param=torch.bfloat16)
    kernel.choose_shape(ADAM, 2, types, torch.device(DEVICE))
    assert sorted({numel for _, numel in launched}) == [512, 1024, 2048, 4096]
    launched.clear()
    shard = adam_shard([5000, 3]).to(DEVICE)
    kernel.update(shard.spans())
    kernel.update(shard.spans(), DeviceScale(torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)))
    kernel.measure([shard.grad])
    assert launched[:3] == [("update", 4096), ("update_unless_skipped", 4096), ("sum_of_squares", 1024)]
    launched.clear()
    TritonKernel().choose_shape(ADAM, 2, types, torch.device(DEVICE))  # what the first one has found is in a file
    assert launched == []


def test_large_shards_alone_have_their_shape_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, SpanTypes]] = []

    class Noting(TritonKernel):
        def choose_shape(self, rule: Rule, num_states: int, types: SpanTypes, device: torch.device) -> None:
            chosen.append((type(rule).__name__, types))

    kernel, plan = Noting(), plan_from_config("AdamW", {}, nn.Linear(1, 1), None)
    kernel.is_interpreted = False
    monkeypatch.setattr(optimizer_plan, "LEAST_NUMEL", 100)
    shards = [full_shard(torch.ones(60, device=DEVICE)), full_shard(torch.ones(60, device=DEVICE))]
    for taken in (shards[:1], shards):
        assert optimizer_plan.verified_kernel(kernel, plan, taken, torch.float32, world_group()) is kernel
    assert chosen == [("Adam", SpanTypes())]


# ---- what a step uploads ----


def test_a_step_uploads_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    uploaded: list[torch.dtype] = []
    to_device = triton_kernels.to_device

    def counting(table: torch.Tensor, device: torch.device) -> torch.Tensor:
        uploaded.append(table.dtype)
        return to_device(table, device)

    monkeypatch.setattr(triton_kernels, "to_device", counting)
    kernel, shard = TritonKernel(SHAPE), adam_shard([200, 50]).to(DEVICE)
    kernel.update(shard.spans())
    assert sorted(map(str, uploaded)) == ["torch.float32", "torch.int32", "torch.int64"]
    shard.rules = [replace(ADAM, step=4)] * 2
    kernel.update(shard.spans(), grad_scale=0.5)
    assert uploaded[3:] == [torch.float32]
    kernel.update(shard.spans(), grad_scale=0.25)
    assert len(uploaded) == 4
    shard.ranges[0] = (0, 199)  # the same addresses, but for another length
    kernel.update(shard.spans())
    assert sorted(map(str, uploaded[4:])) == ["torch.int32", "torch.int64"]


@only_gpu
def test_a_step_neither_waits_for_the_device_nor_compiles_again() -> None:
    kernel, shard = TritonKernel(), adam_shard([5000, 3]).to(DEVICE)
    kernel.update(shard.spans())
    kernel.sum_of_squares([shard.grad])
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    compiled = sorted(cache.iterdir())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(4, 40):
            shard.rules = [replace(ADAM, step=step, lr=1 / step)] * 2
            kernel.sum_of_squares([shard.grad])
            kernel.update(shard.spans(), grad_scale=1 / step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sorted(cache.iterdir()) == compiled


@only_gpu
def test_hyperparameters_that_change_while_the_device_is_busy_reach_their_own_step() -> None:
    kernel = TritonKernel()
    master, grad = torch.zeros(1000, device=DEVICE), torch.ones(1000, device=DEVICE)
    torch.cuda._sleep(100_000_000)
    for step in range(50):
        kernel.update([Span(replace(SGD, momentum=0.0, lr=2.0**step), master, grad, ())])
    check_rounded(master, torch.full((1000,), -(2.0**50 - 1)))
