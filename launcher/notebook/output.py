"""The output of ranks in a cell, and what `launch` has to say about them."""

from __future__ import annotations

from launcher.agent.wire import STDERR, STDOUT
from launcher.api.output import ConsoleOutput, write


class CellOutput(ConsoleOutput):
    """Shows a run in a cell as `launch` shows it on a console."""

    def say(self, text: str) -> None:
        write(STDOUT, f"{text}\n")

    def warning(self, text: str) -> None:
        write(STDERR, f"! {text}\n")
