"""The stack traces of all ranks: requested, collected, written down, shown."""

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
from launcher.job.rank import Rank


class StackCollector:
    """Collects one stack trace of each running rank, as often as it is requested."""

    def __init__(self, plan: JobPlan, watcher: Watcher, put: Callable[[Callable[[], object]], object]) -> None:
        """put: has a file of the run written."""
        self._put = put
        self._path = plan.run_folder / "stacks.txt"
        self._watcher = watcher
        self._deadline_s: float | None = None  # while they are being collected

    def request(self, nodes: Sequence[Node]) -> None:
        """Let every rank that runs write its stacks."""
        self._deadline_s = time.monotonic() + timeouts().stacks_s
        for node in nodes:
            for rank in node.ranks.values():
                rank.stack = None
            if node.has_running_ranks:
                node.send(DumpStacks())

    def is_done(self, ranks: Sequence[Rank]) -> bool:
        """Whether all stacks are there now, or the time for it is over; they are shown then. True once a request."""
        if self._deadline_s is None:
            return False
        if any(rank.is_running and rank.stack is None for rank in ranks) and time.monotonic() < self._deadline_s:
            return False
        self._deadline_s = None
        text = format_stacks({rank.number: rank.stack for rank in ranks if rank.stack is not None})
        self._put(lambda: self._show(text))
        return True

    def _show(self, text: str) -> None:
        try:
            write_private(self._path, text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            self._watcher.warning(f"{self._path}: {error.strerror}")
        self._watcher.stacks(text, str(self._path))
