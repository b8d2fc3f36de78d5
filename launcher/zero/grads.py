"""Gradients on their way from autograd to their owner.

Collectives must be issued in one order on every rank. Units are therefore reduced strictly from the last to the
first, which is about the order in which backward completes them; a unit that is complete early waits for its turn.
"""

from __future__ import annotations

from launcher.base.errors import EngineError
from launcher.zero.stages import ZeroPolicy
from launcher.zero.unit import FlatUnit

# Reductions in flight at once. Each holds a whole gradient buffer, which stage 2 exists to avoid; two keep the
# network busy while the sum of the one before is taken.
MAX_IN_FLIGHT = 2


class GradientReducer:
    """Starts reductions as units complete and bounds how many are on their way."""

    def __init__(self, units: list[FlatUnit], policy: ZeroPolicy) -> None:
        self._units = units
        self._policy = policy
        self._in_backward = False
        self._reduces = False
        self._next = -1  # index of the next unit to reduce, counting down
        self._in_flight: list[FlatUnit] = []

    def begin_backward(self, *, is_boundary: bool) -> None:
        """Prepare for one backward pass; `is_boundary` says that a step follows it."""
        self.wait()  # sums of the micro-batch before may have been on their way through this forward
        self._in_backward = True
        self._reduces = is_boundary or self._policy.stage.shards_gradients
        self._next = len(self._units) - 1
        for unit in self._units:
            unit.begin_backward()

    def take_gradient(self, unit: FlatUnit, index: int) -> None:
        """Take the gradient of one parameter over from autograd."""
        if not self._in_backward:
            raise EngineError(
                "a backward pass ran outside of engine.backward(loss)",
                hint="call engine.backward(loss) instead of loss.backward()",
            )
        unit.take_gradient(index)
        if self._reduces and self._policy.overlap_comm:
            while self._next >= 0 and self._units[self._next].is_complete:
                self._reduce_next()

    def end_backward(self) -> None:
        """Reduce what is left: units with unused parameters, or everything without overlap."""
        self._in_backward = False
        while self._reduces and self._next >= 0:
            self._reduce_next()

    def wait(self) -> None:
        """Block until every reduction that was started has finished."""
        for unit in self._in_flight:
            unit.finish_reduction()
        self._in_flight.clear()

    def _reduce_next(self) -> None:
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._in_flight.pop(0).finish_reduction()
        unit = self._units[self._next]
        unit.start_reduction()
        self._in_flight.append(unit)
        self._next -= 1
