"""The Triton kernels compile for GPUs that are not there; `test_triton.py` runs this file in a process of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from harness.train.spans import RULES, random_shard
from triton.backends.compiler import GPUTarget

from launcher.kernels.api import Adam, DeviceScale, Lamb, Rule, Span
from launcher.kernels.program_shape import CANDIDATES, ProgramShape
from launcher.kernels.triton_kernels import TritonKernel


class AbsentGpu:
    """As much of a driver as compiling needs."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that would have been launched."""
    found: list[Any] = []

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: found.append(kernel.run(*args, grid=grid, warmup=True, **options))

    monkeypatch.setattr(triton.JITFunction, "__getitem__", launch)
    return found


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.soak), 90])
@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.__name__)
def test_kernels_compile_and_move_16_bytes_at_a_time(compiled: list[Any], kind: type[Rule], capability: int) -> None:
    triton.runtime.driver.set_active(AbsentGpu(capability))
    for seed in (0, 1):
        shard, kernel = random_shard(kind, seed, block_numel=64), TritonKernel()
        if kind is Lamb:
            kernel.lamb_moments(shard.spans())
        kernel.update(shard.spans())
        kernel.update(shard.spans(), DeviceScale(torch.ones(()), torch.zeros(())))
        kernel.sum_of_squares([shard.grad])
    for kernel in compiled:
        assert kernel.asm["cubin"]
        if kernel.name != "sum_blocks_of_spans":
            assert "ld.global.v4.b32" in kernel.asm["ptx"]
    # Only the fused operations that are written down, with momentum and without: 8 elements on each of 2 paths.
    fused = [
        len(re.findall(r"\bfma\.rn\.f32", kernel.asm["ptx"])) for kernel in compiled if kernel.name.startswith("update")
    ]
    per_element = {"Adam": {4}, "Adagrad": {2}, "Lion": {1}, "Sgd": {4, 2}, "Lamb": {2}}[kind.__name__]
    assert set(fused) <= {16 * number for number in per_element}


@pytest.mark.parametrize("shape", CANDIDATES, ids=str)
def test_every_shape_of_programs_moves_16_bytes_at_a_time(compiled: list[Any], shape: ProgramShape) -> None:
    triton.runtime.driver.set_active(AbsentGpu(90))
    states = torch.zeros(2, 8192)
    rule = Adam(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=1)
    param = torch.zeros(8192, dtype=torch.bfloat16)
    TritonKernel(shape).update([Span(rule, torch.zeros(8192), torch.zeros(8192), tuple(states), param)])
    [kernel] = compiled
    assert kernel.asm["cubin"]
    assert "ld.global.v4.b32" in kernel.asm["ptx"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_takes_edits_over_compiles(compiled: list[Any], dtype: torch.dtype) -> None:
    triton.runtime.driver.set_active(AbsentGpu(90))
    TritonKernel().take_edits(torch.zeros(5000), torch.zeros(5000, dtype=dtype))
    [kernel] = compiled
    assert kernel.asm["cubin"]
