"""The panel of a run: where it is shown, from when to when, and what it is made of."""

from __future__ import annotations

import sys
from typing import BinaryIO

from launcher.cli.console.facts import RunFacts
from launcher.cli.console.lines import CLEAR_LINE
from launcher.cli.console.streams import is_same_terminal
from launcher.cli.console.terminal import Screen
from launcher.plan.plan import JobPlan


class LiveView(RunFacts):
    """Shows the facts of a run below its output, from the start of its ranks until `close`."""

    def __init__(self, plan: JobPlan) -> None:
        super().__init__(plan)
        self._screen: Screen | None = None
        self._descriptors: list[int] = []  # whose output goes above the panel

    def planned(self, plan: JobPlan) -> None:
        super().planned(plan)
        if self._screen is None:
            stdout, stderr = sys.stdout.fileno(), sys.stderr.fileno()
            self._descriptors = [stdout, *([stderr] if is_same_terminal(stdout, stderr) else [])]
            self._screen = Screen(stdout, self._draw)

    def write(self, stream: BinaryIO, data: bytes, *, is_ours: bool) -> bool:
        """Show output above the panel. False where it has to be written as if there were none.

        is_ours: a line of the launcher, which wipes a progress bar that stands where it goes.
        """
        if self._screen is None or stream.fileno() not in self._descriptors:
            return False
        self._screen.write(CLEAR_LINE + data if is_ours else data)
        return True

    def suspending(self) -> None:
        if self._screen is not None:
            self._screen.pause()

    def continuing(self, away_s: float) -> None:
        if self._screen is not None:
            self._screen.resume()

    def close(self) -> None:
        """Take the panel away; from now on `write` is declined. May be called twice."""
        if self._screen is not None:
            self._screen.close()
            self._screen = None

    def _draw(self, columns: int, rows: int) -> list[str]:
        from launcher.cli.console.panel import draw  # rich: in the drawing thread, while the ranks start

        return draw(self.view(), columns, rows)
