"""How much output of a host may be on its way: the launcher's side of `wire.Handled`."""

from __future__ import annotations

import threading

from launcher.agent.wire import Handled, Output


class Window:
    """Counts what has arrived and been handled of one host's output; it is acknowledged in quarters of the window.

    Output goes several ways (the logs, the display). It is handled when it has come to the end of all of them.
    """

    def __init__(self, num_bytes: int | None, num_ways: int = 1) -> None:
        """num_bytes: the size; None: there is no limit, and nothing is acknowledged."""
        self.num_bytes = num_bytes
        self._lock = threading.Lock()
        self._arrived_bytes = 0
        self._handled_bytes = [0] * num_ways
        self._acknowledged_bytes = 0

    @property
    def is_half_full(self) -> bool:
        """Whether so much is held here that the ranks may have to wait."""
        return self.num_bytes is not None and self._arrived_bytes - min(self._handled_bytes) > self.num_bytes // 2

    def arrived(self, output: Output) -> None:
        """Note that `output` is here. For the one thread that reads the node."""
        self._arrived_bytes += output.cost_bytes

    def handled(self, output: Output, way: int = 0) -> Handled | None:
        """Note that `output` has come to the end of a way. Returns the acknowledgement that is due now, if one is."""
        if self.num_bytes is None:
            return None
        with self._lock:
            self._handled_bytes[way] += output.cost_bytes
            due_bytes = min(self._handled_bytes) - self._acknowledged_bytes
            if due_bytes < self.num_bytes // 4:
                return None
            self._acknowledged_bytes += due_bytes
        return Handled(due_bytes)
