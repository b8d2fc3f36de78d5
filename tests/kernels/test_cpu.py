"""The C++ kernels compute what the reference computes, with every instruction set of this CPU."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from kernels.cases import NUMELS, RULES, check_close, check_same, make_span, random_rule, random_spans, run
from torch import Tensor

from launcher.base.env import CPU_KERNEL
from launcher.kernels import cpu
from launcher.kernels.api import Adagrad, Adam, Lion, Rule, Sgd, Span
from launcher.kernels.cpu import CpuKernel, all_cpu_kernels, cpu_kernel_status, load_cpu_kernel
from launcher.kernels.reference import ReferenceKernel

CASES, QUICK_CASES, CASES_A_TEST = 1000, 300, 100  # those beyond the quick ones only in a soak
REFERENCE = ReferenceKernel()
ADAM = Adam(1e-2, 0.9, 0.99, 1e-8, 0.1, step=3)
LARGE_NUMEL = 200_000  # several chunks


def kernels_here() -> list[CpuKernel]:
    try:
        return all_cpu_kernels()
    except OSError as error:
        # A skip in CI would pass for a test that ran.
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error), allow_module_level=True)


KERNELS = kernels_here()
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=[kernel.name for kernel in KERNELS])
each_rule = pytest.mark.parametrize("kind", RULES, ids=[kind.__name__ for kind in RULES])


@pytest.fixture
def threads() -> Iterator[None]:
    """Put the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.soak] if first >= QUICK_CASES else [])
        for first in range(0, CASES, CASES_A_TEST)
    ],
)
def test_random_work_agrees_with_the_reference_and_between_instruction_sets(first: int) -> None:
    for seed in range(first, first + CASES_A_TEST):
        spans, grad_scale = random_spans(seed)
        best, *others = (run(kernel, spans, grad_scale) for kernel in KERNELS)
        check_close(best, run(REFERENCE, spans, grad_scale))
        for other in others:
            check_same(other, best)


@each_kernel
@each_rule
def test_every_length_from_every_start(kernel: CpuKernel, kind: type[Rule]) -> None:
    rng = random.Random(0)
    spans = [make_span(rng, random_rule(rng, kind), numel, is_plain=numel % 2 == 0) for numel in range(131)]
    check_close(run(kernel, spans, 0.5), run(REFERENCE, spans, 0.5))


@each_kernel
@each_rule
@pytest.mark.usefixtures("threads")
def test_threads_do_not_change_a_bit(kernel: CpuKernel, kind: type[Rule]) -> None:
    rng = random.Random(1)
    spans = [make_span(rng, random_rule(rng, kind), numel) for numel in (LARGE_NUMEL, 3, LARGE_NUMEL // 3)]
    results, sums = [], []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        results.append(run(kernel, spans))
        sums.append(kernel.sum_of_squares([span.grad for span in spans]))
    for other, total in zip(results[1:], sums[1:], strict=True):
        check_same(other, results[0])
        assert total == sums[0]


def test_many_small_spans_with_rules_of_their_own() -> None:
    rng = random.Random(2)
    spans = [make_span(rng, replace(ADAM, lr=10 ** rng.uniform(-4, -1)), rng.choice(NUMELS[:5])) for _ in range(3000)]
    expected = run(REFERENCE, spans)
    for kernel in KERNELS:
        check_close(run(kernel, spans), expected)


@each_kernel
def test_no_spans_at_all(kernel: CpuKernel) -> None:
    kernel.update([])
    assert kernel.lamb_moments([]).shape == (0, 2)
    assert kernel.sum_of_squares([]) == 0


# ---- the bits of torch's own fused kernels ----


def fused_steps(kind: type[torch.optim.Optimizer], options: dict[str, object], start: Tensor, num_steps: int) -> Tensor:
    param = start.clone().requires_grad_()
    optimizer = kind([param], fused=True, **options)
    for step in range(num_steps):
        param.grad = gradient(step)
        optimizer.step()
    return param.detach()


def gradient(step: int) -> Tensor:
    return torch.randn(4096, generator=torch.Generator().manual_seed(step))


@each_kernel
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch fuses no products")
@pytest.mark.parametrize(
    ("kind", "options", "rule"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1}, Adam(1e-2, 0.9, 0.999, 1e-8, 0.1, 1)),
        (torch.optim.Adam, {"weight_decay": 0.1}, Adam(1e-2, 0.9, 0.999, 1e-8, 0.1, 1, is_decoupled=False)),
        (torch.optim.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1}, Adagrad(1e-2, 1e-10, 0.1, 0.1, 1)),
        (torch.optim.SGD, {"weight_decay": 0.1}, Sgd(1e-2, 0.0, 0.0, 0.1, False, True)),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.2}, Sgd(1e-2, 0.9, 0.2, 0.0, False, True)),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, Sgd(1e-2, 0.9, 0.0, 0.0, True, True)),
    ],
    ids=["AdamW", "Adam", "Adagrad", "SGD", "SGD with dampening", "SGD with Nesterov"],
)
def test_fp32_has_the_bits_of_torch_fused(
    kernel: CpuKernel, kind: type[torch.optim.Optimizer], options: dict[str, object], rule: Rule
) -> None:
    start = gradient(99)
    master, states = start.clone(), tuple(torch.zeros_like(start) for _ in rule.STATES)
    for step in range(6):
        now = replace(rule, is_first=step == 0) if isinstance(rule, Sgd) else replace(rule, step=step + 1)
        kernel.update([Span(now, master, gradient(step), states if getattr(rule, "momentum", 1) else ())])
    assert torch.equal(master, fused_steps(kind, {"lr": 1e-2, **options}, start, 6))


# ---- conversions ----


@each_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16bit_gradient_is_widened_exactly(kernel: CpuKernel, dtype: torch.dtype) -> None:
    grad = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    master = torch.zeros(grad.numel())
    kernel.update([Span(Sgd(-1.0, 0.0, 0.0, 0.0, False, True), master, grad, ())])
    torch.testing.assert_close(master, grad.float(), rtol=0, atol=0, equal_nan=True)


@each_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_to_nearest_even(kernel: CpuKernel, dtype: torch.dtype) -> None:
    halves = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype).float().view(torch.int32)
    ties = halves + (1 << (15 if dtype == torch.bfloat16 else 12))  # half-way to the next number of its size
    anything = torch.randint(-(1 << 31), 1 << 31, (1 << 18,), generator=torch.Generator().manual_seed(0))
    subnormal = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)) * 2.0**-13
    bits = torch.cat([halves, ties - 1, ties, ties + 1, anything.to(torch.int32), subnormal.view(torch.int32)])
    master = bits.view(torch.float32).clone()
    param = torch.empty(master.numel(), dtype=dtype)
    kernel.update(
        [Span(Lion(0.0, 0.9, 0.9, 0.0), master, torch.zeros_like(master), (torch.zeros_like(master),), param)]
    )
    torch.testing.assert_close(param, bits.view(torch.float32).to(dtype), rtol=0, atol=0, equal_nan=True)


# ---- norms ----


@each_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sum_of_squares(kernel: CpuKernel, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(numel + 3, generator=generator).to(dtype)[3:] for numel in (*range(70), LARGE_NUMEL)]
    total = kernel.sum_of_squares(grads)
    assert total.dtype == torch.float64
    assert float(total) == pytest.approx(float(REFERENCE.sum_of_squares(grads)), rel=1e-12)
    assert total == KERNELS[-1].sum_of_squares(grads)
    assert kernel.measure(grads)[1].tolist() == REFERENCE.measure(grads)[1].tolist() == [-1, -1]
    for value in (float("inf"), float("-inf"), float("nan")):
        grads[33][32] = grads[40][0] = value
        assert not kernel.sum_of_squares(grads).isfinite()
        assert kernel.measure(grads)[1].tolist() == REFERENCE.measure(grads)[1].tolist() == [33, 32]


@each_kernel
def test_sums_of_the_largest_gradients_are_finite(kernel: CpuKernel) -> None:
    largest = torch.full((1000,), torch.finfo(torch.float32).max)
    assert kernel.sum_of_squares([largest]) == REFERENCE.sum_of_squares([largest])


# ---- copies ----


@each_kernel
def test_scaled_copies_of_every_length_from_every_start(kernel: CpuKernel) -> None:
    generator = torch.Generator().manual_seed(0)
    for numel in (*range(70), LARGE_NUMEL):
        for start in (0, 1, 5):
            source = torch.randn(numel + start, generator=generator)[start:]
            memory = torch.full((numel + 8,), 7.0)
            kernel.scaled_copy(memory[start : start + numel], source, 0.3)
            expected = torch.full((numel + 8,), 7.0)
            torch.mul(source, 0.3, out=expected[start : start + numel])
            assert torch.equal(memory, expected)


@each_kernel
def test_copies_of_every_number_of_bytes_from_every_start(kernel: CpuKernel) -> None:
    """Bits of any kind: signalling NaNs and subnormals, too."""
    generator = torch.Generator().manual_seed(0)
    for num_bytes in (*range(200), 4 * LARGE_NUMEL + 3):
        for start in (0, 2, 33, 64):
            source = torch.randint(256, (num_bytes + start,), dtype=torch.uint8, generator=generator)[start:]
            memory = torch.full((num_bytes + 128,), 7, dtype=torch.uint8)
            kernel.copy(memory[start : start + num_bytes], source)
            expected = torch.full((num_bytes + 128,), 7, dtype=torch.uint8)
            expected[start : start + num_bytes] = source
            assert torch.equal(memory, expected)


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_a_copy_takes_what_the_kernel_does_not(scale: float) -> None:
    numel = 2**19  # large enough for the kernel
    for dtype in (torch.float32, torch.bfloat16):
        source = torch.randn(2 * numel).to(dtype)
        for given in (source[:numel], source[::2], source[:8]):  # contiguous, strided, small
            target = torch.empty(given.numel(), dtype=dtype)
            cpu.scaled_copy(target, given, scale)
            assert torch.equal(target, given * scale)


def test_a_copy_of_another_length_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="size"):
        cpu.scaled_copy(torch.empty(2**19), torch.ones(2**19 - 1), 1.0)


# ---- the library ----


def test_tensors_it_cannot_take_are_refused() -> None:
    master, grad, state = (torch.zeros(8) for _ in range(3))
    span = Span(Lion(1e-3, 0.9, 0.99, 0.0), master, grad, (state,))
    for wrong in (torch.zeros(9), torch.zeros(8).double(), torch.zeros(16)[::2], torch.zeros(8, device="meta")):
        for bad in (replace(span, grad=wrong), replace(span, states=(wrong,)), replace(span, param=wrong)):
            with pytest.raises(ValueError, match="contiguous"):
                KERNELS[0].update([bad])


def test_a_thread_that_uses_a_part_of_the_threads_leaves_others_theirs(threads: None) -> None:
    """As torch counts them too: MKL has one number for the process, which a forward beside an update reads."""
    torch.set_num_threads(2)
    found: list[tuple[int, int]] = []

    def use_a_part() -> None:
        with cpu.part_of_threads(0.5):
            found.append((cpu.num_threads(), torch.get_num_threads()))

    thread = threading.Thread(target=use_a_part)
    with cpu.part_of_threads(1.0):
        thread.start()
        thread.join()
        found.append((cpu.num_threads(), torch.get_num_threads()))
    assert found == [(1, 2), (2, 2)]


FORKED = """
import os, signal, torch
from launcher.kernels.cpu import load_cpu_kernel
kernel, ones = load_cpu_kernel(), torch.ones(1 << 18)
torch.set_num_threads(2)
assert ones.mul(2).sum() == 2 << 18 and kernel.sum_of_squares([ones]) == 1 << 18
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(0 if all(kernel.sum_of_squares([ones]) == 1 << 18 for _ in range(20)) else 3)
_, status = os.waitpid(child, 0)
maps = open("/proc/self/maps").read().split()
print("status", status, *sorted({path for path in maps if "libgomp" in path or "libomp" in path}))
"""


def test_it_works_after_a_fork_and_brings_no_second_openmp() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True)
    assert re.match(r"status 0 \S+\n$", done.stdout), done.stdout + done.stderr


def status_of(monkeypatch: pytest.MonkeyPatch, wanted: str) -> cpu.CpuKernelStatus:
    monkeypatch.setenv(CPU_KERNEL.name, wanted)
    return cpu_kernel_status.__wrapped__()


def test_the_instruction_set_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in KERNELS:
        chosen = status_of(monkeypatch, kernel.name.removeprefix("C++ ")).kernel
        assert chosen is not None
        assert chosen.name == kernel.name
    best = status_of(monkeypatch, "").kernel
    assert best is not None
    assert best.name == KERNELS[0].name
    assert status_of(monkeypatch, "off") == cpu.CpuKernelStatus(None, "off by LAUNCH_CPU_KERNEL")
    assert "LAUNCH_CPU_KERNEL=AVX9, but this CPU has" in status_of(monkeypatch, "AVX9").reason


def test_a_library_that_is_missing_or_of_another_version_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_cpu_kernel() is not None
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "_ABI_VERSION", -1)
        assert "was built from other sources" in status_of(patch, "").reason
    monkeypatch.setattr(cpu, "LIBRARY", cpu.LIBRARY.with_name("no_such.so"))
    status = status_of(monkeypatch, "")
    assert status.kernel is None
    assert status.reason.startswith("not built: ")
