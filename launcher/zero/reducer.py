"""Gradients on their way from autograd to their owner.

Collectives must be issued in one order on every rank. Units are therefore reduced strictly from the last to the
first, which is about the order in which backward completes them; a unit that is complete early waits for its turn.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from launcher.base.errors import EngineError
from launcher.comm import collectives
from launcher.comm.groups import DataParallelGroup
from launcher.zero.gradients import UnitGradients
from launcher.zero.stages import ZeroPolicy

# Reductions in flight at once. Each holds a whole gradient buffer, which stage 2 exists to avoid; two keep the
# network busy while the sum of the one before is taken.
MAX_IN_FLIGHT = 2


class GradientReducer:
    """Starts reductions as units complete and bounds how many are on their way."""

    def __init__(self, gradients: list[UnitGradients], policy: ZeroPolicy, group: DataParallelGroup) -> None:
        """gradients: those of all units that have any, in forward order."""
        self._gradients = gradients
        self._policy = policy
        self._group = group
        self._scale = policy.reduction.factor(group.world_size)
        self._graph_tasks: set[int] = set()  # autograd's graphs that have delivered gradients in this backward
        # Asked at each reduction, alike on every rank: is the next step to get each rank's own gradients? Stage 0 only.
        self.keeps_local: Callable[[], bool] = lambda: False
        self._in_backward = False
        self._reduces = False
        self._is_boundary = False
        self._next = -1  # the next unit to reduce, counting down
        self._in_flight: list[UnitGradients] = []
        self._advanced: list[UnitGradients] = []  # in the last phase of their reduction

    def begin_backward(self, *, is_boundary: bool) -> None:
        """Prepare for one backward pass; `is_boundary` says that a step follows it."""
        self.wait()  # sums of the micro-batch before may have been on their way through this forward
        self._in_backward = True
        self._is_boundary = is_boundary
        self._reduces = is_boundary or self._policy.stage.shards_gradients
        self._next = len(self._gradients) - 1
        self._graph_tasks.clear()
        for gradients in self._gradients:
            gradients.begin_backward()

    def take_gradient(self, gradients: UnitGradients, index: int) -> None:
        """Take the gradient of one parameter over from autograd."""
        if not self._in_backward:
            raise EngineError(
                "a backward pass ran outside of engine.backward(loss)",
                hint="call engine.backward(loss), or engine.scale(loss).backward(), instead of loss.backward()",
            )
        graph_task = torch._C._current_graph_task_id()
        self._graph_tasks.add(graph_task)
        gradients.note_arrival(graph_task)
        gradients.take(index)
        if self._reduces and self._policy.overlap_comm:
            while self._next >= 0 and self._gradients[self._next].is_complete:
                self._reduce_next()

    def end_backward(self) -> None:
        """Reduce what is left: units with unused parameters, or everything without overlap."""
        self._in_backward = False
        while self._reduces and self._next >= 0:
            self._reduce_next()
        if self._reduces and self._policy.overlap_comm and len(self._graph_tasks) > 1:
            self._reduce_late()

    def _reduce_late(self) -> None:
        """Sum what came after its unit's sum was begun.

        Reentrant checkpointing runs backward passes within the backward pass. Each of them delivers the gradients of
        what it has used, so what several of them use gets several gradients. Which units had late ones may differ
        between ranks whose models use different parameters: all ranks sum what any of them has.
        """
        has_late = [float(gradients.has_late) for gradients in self._gradients]
        num_ranks = collectives.sum_scalars(
            self._group, torch.tensor(has_late, dtype=torch.float64, device=self._group.device)
        )
        late = [gradients for gradients, num in zip(self._gradients, num_ranks.tolist(), strict=True) if num]
        if late:
            self.wait()
        for gradients in reversed(late):
            self._make_room()
            gradients.reduce_late(self._scale)
            self._in_flight.append(gradients)

    def complete(self) -> None:
        """Reduce, before a step, what the last backward pass did not: it was not known to be the last."""
        if not self._reduces:
            self._reduces = self._is_boundary = True
            self._next = len(self._gradients) - 1
            self.end_backward()

    def abort_backward(self) -> None:
        """Leave a backward pass that an exception ended."""
        self._in_backward = False

    def wait(self) -> None:
        """Block until every reduction that was started has finished."""
        while self._in_flight:
            self._advance_oldest()
        for gradients in self._advanced:
            gradients.finish_reduction(measure=self._is_boundary)
        self._advanced.clear()

    def _advance_oldest(self) -> None:
        oldest = self._in_flight.pop(0)
        if self._policy.stage.shards_optimizer:
            oldest.finish_reduction(measure=self._is_boundary)
        else:  # the sum is there, its way back to every rank begins
            oldest.advance_reduction()
            self._advanced.append(oldest)

    def _reduce_next(self) -> None:
        self._make_room()
        gradients = self._gradients[self._next]
        gradients.start_reduction(self._scale, stays_local=self.keeps_local())
        self._in_flight.append(gradients)
        self._next -= 1

    def _make_room(self) -> None:
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._advance_oldest()
