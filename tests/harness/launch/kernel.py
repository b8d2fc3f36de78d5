"""A real Jupyter kernel for tests: cells go in, outputs come out, an interrupt is the button's."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import nbformat
from harness.launch.command import ROOT, slowness
from nbclient import NotebookClient
from traitlets.config import Config

DEADLINE_S = 120.0


def text_of(cell: Any, kinds: tuple[str, ...] = ("stdout", "stderr", "error")) -> str:
    """Return a cell's streams and error texts in order."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream" and output.name in kinds:
            parts.append(output.text)
        elif output.output_type == "error" and "error" in kinds:
            parts.append("\n".join(output.traceback))
    return "".join(parts)


class Kernel:
    """A kernel with this interpreter in a folder of its own; use as an async context manager."""

    def __init__(self, folder: Path, notebook: Any = None) -> None:
        self.notebook = notebook or nbformat.v4.new_notebook()
        self.client = NotebookClient(
            self.notebook,
            timeout=int(DEADLINE_S * slowness()),
            kernel_name="python3",
            allow_errors=True,
            resources={"metadata": {"path": str(folder)}},
            # Not TCP: the kernel binds ports that were free a second before, and another test may have them by then.
            config=Config({"KernelManager": {"transport": "ipc", "ip": str(folder / "kernel")}}),
        )
        self._setup = self.client.async_setup_kernel(env={**os.environ, "PYTHONPATH": str(ROOT)})

    async def __aenter__(self) -> Kernel:
        await self._setup.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._setup.__aexit__(kind, error, trace)

    def start(self, source: str) -> tuple[Any, asyncio.Task[Any]]:
        """Start a cell; its outputs fill while it runs."""
        cell = nbformat.v4.new_code_cell(source)
        self.notebook.cells.append(cell)
        task = asyncio.ensure_future(self.client.async_execute_cell(cell, len(self.notebook.cells) - 1))
        return cell, task

    async def run(self, source: str) -> Any:
        """Run a cell to its end and return it."""
        cell, task = self.start(source)
        await task
        return cell

    async def run_well(self, source: str) -> str:
        """Run a cell that must not raise and return its output."""
        cell = await self.run(source)
        assert not [output for output in cell.outputs if output.output_type == "error"], text_of(cell)
        return text_of(cell)

    async def interrupt(self) -> None:
        """Press the interrupt button."""
        await self.client.km.interrupt_kernel()


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Wait for a condition while the kernel's messages are being read."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s for {what}"
        await asyncio.sleep(0.02)
