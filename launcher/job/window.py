"""How much output of a node may be on its way: the controller's side of `wire.Handled`."""

from __future__ import annotations

from launcher.agent.wire import Handled, Output


class Window:
    """Counts what has been handled of one node's output; the agent hears of it in steps of a quarter of the window."""

    def __init__(self, num_bytes: int | None) -> None:
        self._num_bytes = num_bytes
        self._untold_bytes = 0

    def handled(self, output: Output) -> Handled | None:
        """Note that `output` has been handled. Returns what the agent is to be told now, if anything."""
        if self._num_bytes is None:
            return None
        self._untold_bytes += output.cost_bytes
        if self._untold_bytes < self._num_bytes // 4:
            return None
        told_bytes, self._untold_bytes = self._untold_bytes, 0
        return Handled(told_bytes)
