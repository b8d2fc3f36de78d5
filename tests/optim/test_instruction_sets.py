"""Optimizers and engines compute the same with each instruction set of this CPU, torch's and the kernels', and threads.

A test whose result depends on the last bits of sums passes on the machine it was written on and fails on another.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from harness.launch.command import ROOT

from launcher.base.env import CPU_KERNEL
from launcher.kernels.cpu import all_cpu_kernels

# torch's name -> the kernels', from the least to the best.
SETS = {"default": "SSE2", "avx2": "AVX2", "avx512": "AVX-512"}
BEST = torch.backends.cpu.get_cpu_capability().lower()
OWN = list(SETS)[: list(SETS).index(BEST) + 1] if BEST in SETS else []
# Compressed steps, whose signs make last bits large; kernels; the engine bit by bit beside plain loops; what has limits
# in numbers: models in parts beside whole ones, and losses and weights beside loops that sum in another order.
TESTS = (
    "tests/optim/test_onebit.py::test_compressed_steps_are_the_papers",
    "tests/optim/test_onebit.py::test_the_warm_up_is_the_plain_optimizer",
    "tests/kernels/test_cpu.py::test_random_work_agrees_with_the_reference_and_between_instruction_sets[0]",
    "tests/engine/test_parity.py::test_fp32_equals_the_plain_loop",
    "tests/engine/test_parity.py::test_many_steps_of_three_ranks_whose_shares_are_uneven[3]",
    "tests/engine/test_parity.py::test_fp16_equals_the_mixed_precision_loop",
    "tests/engine/test_precision.py::test_what_is_kept_in_16_bits",
    "tests/zero/test_delayed.py::test_the_same_bits_as_a_loop_one_step_behind",
    "tests/zero/test_reads.py::test_models_train_as_in_a_plain_loop",
    "tests/zero/test_stage3.py::test_every_model_trains_as_plain_torch_does",
    "tests/parallel/test_tensor_models.py::test_a_split_model_trains_as_one_process_does",
    "tests/parallel/test_engine.py::test_every_stage_trains_as_one_process_does",
    "tests/parallel/test_sequence.py::test_every_stage_trains_as_one_process_does",
    "tests/parallel/test_pipeline.py::test_every_schedule_trains_as_one_process_does",
)
# Of these only worlds of up to two ranks and few cases of a kind: the other processes cost more than the work.
CHOSEN = (
    "papers and 2 or warm_up and 2 or random_work or fp32 and -1-2 or uneven or restless-1-1 or kept and 2"
    " or 2-bf16 or ReturnedParameter-0 or Repeated-sharded or Mixture or olmo2 or llama or 2-2-3 or 1f1b"
)
# Each set, and two threads with the best one, are of `make numerics`; the whole product is of `make soak`.
CASES = [
    pytest.param(name, num_threads, marks=() if num_threads == 1 or name == BEST else pytest.mark.long)
    for name in OWN
    for num_threads in (1, 2)
]


@pytest.mark.skipif(not OWN, reason="the CPU has no instruction set that torch knows")
@pytest.mark.soak
@pytest.mark.parametrize(("name", "num_threads"), CASES)
def test_numbers_do_not_depend_on_the_processor(name: str, num_threads: int) -> None:
    kernels = [kernel.name.removeprefix("C++ ") for kernel in all_cpu_kernels()]
    variables = {"ATEN_CPU_CAPABILITY": name, CPU_KERNEL.name: SETS[name]}
    variables |= dict.fromkeys(("OMP_NUM_THREADS", "TEST_RANK_THREADS"), str(num_threads))
    assert SETS[name] in kernels
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    result = subprocess.run(
        [*command, *TESTS, "-k", CHOSEN, "-m", "not soak and not long"],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-20_000:]
    assert " passed" in result.stdout
    assert "skipped" not in result.stdout
