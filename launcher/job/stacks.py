"""The stacks of all ranks: asked for, collected, written down, shown."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from launcher.agent.wire import DumpStacks
from launcher.base.private_files import write_private
from launcher.base.timeouts import timeouts
from launcher.job.events import Watcher
from launcher.job.hang import format_stacks
from launcher.job.node import Node
from launcher.job.plan import JobPlan


class StackCollector:
    """Collects one stack of each running rank, as often as somebody asks."""

    def __init__(self, plan: JobPlan, watcher: Watcher, put: Callable[[Callable[[], object]], object]) -> None:
        """put: has a file of the run written."""
        self._put = put
        self._path = plan.run_folder / "stacks.txt"
        self._watcher = watcher
        self._found: dict[int, str] | None = None  # by rank, while they are being collected
        self._deadline_s = 0.0

    def ask(self, nodes: Sequence[Node]) -> None:
        """Let every rank that runs write its stacks."""
        self._found, self._deadline_s = {}, time.monotonic() + timeouts().stacks_s
        for node in nodes:
            if node.running:
                node.send(DumpStacks())

    def add(self, rank: int, text: str) -> None:
        """Take one rank's answer."""
        if self._found is not None:
            self._found[rank] = text

    def take(self, nodes: Sequence[Node]) -> dict[int, str] | None:
        """Return the stacks, which are shown, once all are there, or the time for it is over; None before."""
        if self._found is None:
            return None
        running = {rank for node in nodes for rank in node.running}
        if not running <= self._found.keys() and time.monotonic() < self._deadline_s:
            return None
        found, self._found = self._found, None
        text = format_stacks(found)
        self._put(lambda: self._show(text))
        return found

    def _show(self, text: str) -> None:
        try:
            write_private(self._path, text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            self._watcher.warning(f"{self._path}: {error.strerror}")
        self._watcher.stacks(text, str(self._path))
