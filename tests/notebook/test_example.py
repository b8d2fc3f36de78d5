"""The example notebook runs from top to bottom, and is committed without outputs; the engine in a kernel."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nbformat
import pytest
from harness.launch.command import ROOT
from harness.launch.kernel import Kernel

EXAMPLE = ROOT / "examples" / "notebook.ipynb"
# Run after the example's cells: the environment of a rank is gone, and can be emulated again.
EMULATES_AGAIN = """
print("AFTER", "RANK" in os.environ, torch.distributed.is_initialized())
with launcher.notebook.emulate():
    engine, *_ = launcher.initialize(model=torch.nn.Linear(3, 1), config=CONFIG)
    loss = engine(torch.ones(16, 3, device=engine.device)).mean()
    engine.backward(loss)
    engine.step()
    print("STEPS", engine.global_steps, "WORLD", torch.distributed.get_world_size())
print("AFTER", "RANK" in os.environ, torch.distributed.is_initialized())
"""


@pytest.mark.long
def test_the_example_runs_and_leaves_the_kernel_as_it_was(tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLE, as_version=4)
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]

    async def session() -> tuple[str, str]:
        async with Kernel(tmp_path) as kernel:
            out = "".join([await kernel.run_well(source) for source in sources])
            return out, await kernel.run_well(EMULATES_AGAIN)

    out, again = asyncio.run(session())
    told = [line for line in again.splitlines() if line.startswith(("AFTER", "STEPS"))]
    assert told == ["AFTER False False", "STEPS 1 WORLD 1", "AFTER False False"]
    assert out.count("loss ") == 3
    for rank in range(2):
        assert f"[{rank}] hello from rank {rank} of 2 - sum 3.0\n" in out


def test_the_example_is_committed_without_outputs() -> None:
    notebook = nbformat.read(EXAMPLE, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
