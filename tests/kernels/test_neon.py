"""The kernels of 64-bit Arm give the bits of those of this CPU. Needs a cross compiler and an emulator.

`apt-get install g++-aarch64-linux-gnu qemu-user` has both. `make test` does not install them: on most machines, and in
CI, this test is skipped.
"""

from __future__ import annotations

import pytest
from kernels.cases import check_close, check_same, random_spans, run
from kernels.foreign import ForeignKernel, missing_tool

from launcher.kernels.cpu import load_cpu_kernel
from launcher.kernels.reference import ReferenceKernel

CASES = 200


@pytest.mark.skipif(missing_tool() is not None, reason=f"{missing_tool()} is not installed")
def test_random_work_has_the_same_bits(tmp_path_factory: pytest.TempPathFactory) -> None:
    foreign = ForeignKernel(tmp_path_factory.mktemp("arm"))
    assert foreign.name == "NEON"
    here = load_cpu_kernel()
    for seed in range(CASES):
        spans, grad_scale = random_spans(seed)
        found = run(foreign, spans, grad_scale)
        check_close(found, run(ReferenceKernel(), spans, grad_scale))
        if here is not None:
            check_same(found, run(here, spans, grad_scale))
