"""Optimizers and engines compute the same with the other instruction sets of this CPU, torch's and the kernels'.

A test whose result depends on the last bits of sums passes on the machine it was written on and fails on another.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from harness.launching import ROOT

from launcher.base.env import CPU_KERNEL
from launcher.kernels.cpu import all_cpu_kernels

# torch's name -> the kernels', from the least to the best. The best is what every other test runs with.
SETS = {"default": "SSE2", "avx2": "AVX2", "avx512": "AVX-512"}
BEST = torch.backends.cpu.get_cpu_capability().lower()
OTHERS = list(SETS)[: list(SETS).index(BEST)] if BEST in SETS else []
# Compressed steps, whose signs make last bits large; kernels; the engine bit by bit beside plain loops.
TESTS = (
    "tests/optim/test_onebit.py::test_compressed_steps_are_the_papers",
    "tests/kernels/test_cpu.py::test_random_work_agrees_with_the_reference_and_between_instruction_sets[0]",
    "tests/kernels/test_cpu.py::test_every_length_from_every_start",
    "tests/engine/test_parity.py::test_fp32_equals_the_plain_loop",
    "tests/engine/test_parity.py::test_fp16_equals_the_mixed_precision_loop",
    "tests/engine/test_precision.py::test_what_is_kept_in_16_bits",
    "tests/zero/test_delayed.py::test_the_same_bits_as_a_loop_one_step_behind",
)
# Of these only worlds of up to two ranks and one case of a kind: the other processes cost more than the work.
CHOSEN = "papers and 2 or random_work or every_length or fp32 and -1-2 or restless-1-1 or kept and 2 or 2-bf16"


@pytest.mark.skipif(not OTHERS, reason="the CPU has one instruction set that torch knows")
@pytest.mark.soak
@pytest.mark.parametrize("name", OTHERS)
def test_numbers_do_not_depend_on_the_processor(name: str) -> None:
    kernels = [kernel.name.removeprefix("C++ ") for kernel in all_cpu_kernels()]
    variables = {"ATEN_CPU_CAPABILITY": name, CPU_KERNEL.name: SETS[name]}
    assert SETS[name] in kernels
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    result = subprocess.run(
        [*command, *TESTS, "-k", CHOSEN], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-20_000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout
