"""The Triton kernels, in processes of their own: an import settles whether Triton interprets or compiles."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from launcher.kernels import triton_kernels

ON_DEVICE = Path(__file__).parent
NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None and not os.environ.get("CI"),  # a skip in CI would pass for a test
    reason="needs Triton",
)


def run_pytest(name: str, cache: Path, *options: str, **environment: str) -> None:
    """Run the tests of another file of this folder, which must all pass."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ON_DEVICE / name), *options],
        env={**inherited, "TRITON_CACHE_DIR": str(cache), **environment},
        cwd=ON_DEVICE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@NEEDS_TRITON
def test_parity_interpreted(tmp_path: Path) -> None:
    run_pytest("triton_parity.py", tmp_path, TRITON_INTERPRET="1")


@pytest.mark.soak
@NEEDS_TRITON
def test_parity_interpreted_in_all_cases(tmp_path: Path) -> None:
    run_pytest("triton_parity.py", tmp_path, "-m", "soak", TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_parity_on_the_gpu(tmp_path: Path) -> None:
    run_pytest("triton_parity.py", tmp_path, "-m", "soak or not soak")


@pytest.mark.long
@NEEDS_TRITON
def test_kernels_compile_without_a_gpu(tmp_path: Path) -> None:
    run_pytest("triton_compiles.py", tmp_path)


@pytest.mark.soak
@NEEDS_TRITON
def test_kernels_compile_for_older_gpus(tmp_path: Path) -> None:
    run_pytest("triton_compiles.py", tmp_path, "-m", "soak")


def test_without_triton_there_is_no_kernel_but_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    triton_kernels.find_triton_kernel.cache_clear()
    try:
        assert triton_kernels.load_triton_kernel() is None
        assert "triton" in str(triton_kernels.triton_problem())
    finally:
        triton_kernels.find_triton_kernel.cache_clear()
