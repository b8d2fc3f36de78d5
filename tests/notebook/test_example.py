"""The example notebook runs from top to bottom, and is committed without outputs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nbformat
from harness.kernel import Kernel
from harness.launching import ROOT

EXAMPLE = ROOT / "examples" / "notebook.ipynb"


def test_the_example_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLE, as_version=4)
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]

    async def session() -> str:
        async with Kernel(tmp_path) as kernel:
            return "".join([await kernel.run_well(source) for source in sources])

    out = asyncio.run(session())
    assert out.count("loss ") == 3
    for rank in range(2):
        assert f"[{rank}] hello from rank {rank} of 2 - sum 3.0\n" in out


def test_the_example_is_committed_without_outputs() -> None:
    notebook = nbformat.read(EXAMPLE, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
