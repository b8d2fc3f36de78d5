"""Updates in host memory that begin when the gradient of a unit has arrived, beside the backward pass of the others.

After Lian et al., "SuperOffload", https://arxiv.org/abs/2509.21271: an update that turns out to be another one is taken
back.

[Note: the same bits as a step that waits]
What a unit's update needs of all others is one number, what gradients are multiplied by. It is 1 / loss scale, unless
their norm is above the limit; that, and whether the step is skipped, is known when the last gradient has arrived. Until
the step has confirmed the number, what the update has written is kept as it was before. Where the number is another
one, or a gradient, a hyper-parameter or a master is read or written in the meantime, the values of before are copied
back, and the step takes the update as it does without this. Each rank decides that by itself: an update in host memory
is no collective, and the parameters follow masters in `step()` alone.

A step whose norm is above the limit is mostly followed by one like it, which then waits: no update is taken twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from launcher.comm.streams import StreamEvent
from launcher.config.policies import Place
from launcher.kernels.cpu import part_of_threads
from launcher.optim.api import UnitOptimizer, UnitUpdate
from launcher.zero.gradients import UnitGradients
from launcher.zero.unit import FlatUnit


class EarlyUpdate:
    """Takes updates of one engine in a thread. Nothing here is collective."""

    def __init__(
        self,
        units: Sequence[FlatUnit],
        optimizer: UnitOptimizer,
        loss_scale: Callable[[], float],
        cores_fraction: float,
    ) -> None:
        """loss_scale: returns what the next step will be taken with. cores_fraction: of the threads that update."""
        self._optimizer = optimizer
        self._loss_scale = loss_scale
        self._thread = ThreadPoolExecutor(1, "launch-early-update")
        self._of: dict[UnitGradients, _OfUnit] = {}
        for unit in units:
            if unit.grads is not None and unit.grads.place is Place.HOST:
                self._of[unit.grads] = unit.params.pending = _OfUnit(unit, cores_fraction)
        self._is_open = False  # updates may begin
        self._scale = 1.0  # of those that have begun in this pass
        self._options: list[dict[str, Any]] = []  # of the optimizer's groups then
        self._was_clipped = False
        self.num_kept = 0  # updates of units that steps have confirmed
        self.num_taken_back = 0

    def begin_backward(self, *, is_boundary: bool) -> None:
        """Take back what has begun: gradients are going to change. is_boundary: a step follows the pass."""
        self.take_back()
        self._is_open = is_boundary and not self._was_clipped

    def start(self, gradients: UnitGradients) -> None:
        """Start the update of a unit whose sum is complete, or on its way to host memory."""
        of_unit = self._of.get(gradients)
        if of_unit is None or not self._is_open or of_unit.is_started or not of_unit.is_final:
            return
        if not any(each.is_started for each in self._of.values()):
            self._scale = 1.0 / self._loss_scale()
            self._options = self._optimizer.saved_groups()
        update = self._optimizer.prepare_unit(of_unit.index, gradients.optimizer_grad, self._scale)
        of_unit.start(self._thread, update)

    def finish(self, scale: float, *, is_skipped: bool) -> Collection[int]:
        """Return the indices of the units that have the update of this step; take all others back.

        scale: what the step multiplies gradients by.
        """
        self._is_open = False
        self._was_clipped = not is_skipped and scale != 1.0 / self._loss_scale()
        started = [each for each in self._of.values() if each.is_started]
        is_right = not is_skipped and scale == self._scale and self._options == self._optimizer.saved_groups()
        if not is_right:
            self.take_back()
            return ()
        for each in started:
            each.keep()
        self.num_kept += len(started)
        return [each.index for each in started]

    def take_back(self) -> None:
        """Take back every update that has begun, and begin no further one in this pass."""
        self._is_open = False
        for each in self._of.values():
            self.num_taken_back += each.is_started
            each.wait()

    def end(self) -> None:
        """Take back what has begun and end the thread."""
        self.take_back()
        self._thread.shutdown()
        for each in self._of.values():
            each.unit.params.pending = None


class _OfUnit:
    """The update of one unit that may have begun early. As `UnitParameters.pending` it is waited for by taking it back.

    The parameters are those of the last step: they do not follow until the next one.
    """

    is_written_back = True

    def __init__(self, unit: FlatUnit, cores_fraction: float) -> None:
        self.unit = unit
        self.index = unit.index
        self._cores_fraction = cores_fraction
        self._update: UnitUpdate | None = None  # that has begun
        self._running: Future[None] | None = None
        self._before: list[Tensor] = []  # 1-D each, what the update writes, as it was; the memory is used again
        self._has_begun = False  # to write: `_before` is complete

    @property
    def is_started(self) -> bool:
        """Whether an update has begun that no step has confirmed."""
        return self._update is not None

    @property
    def is_final(self) -> bool:
        """Whether nothing but a user's own writes can change the gradient, or the master, before the step."""
        grads, params = self.unit.grads, self.unit.params
        assert grads is not None
        is_edited = params.may_be_edited or params.first_written() is not None  # the step takes it over first
        return all(grads.used) and not (grads.has_late or grads.is_incomplete or is_edited)

    def start(self, thread: ThreadPoolExecutor, update: UnitUpdate) -> None:
        """Have the thread take the update when the gradient has arrived."""
        assert self.unit.grads is not None
        self._update = update
        self._running = thread.submit(self._run, update, self.unit.grads.arrival)

    def _run(self, update: UnitUpdate, arrival: StreamEvent) -> None:
        arrival.synchronize()
        with part_of_threads(self._cores_fraction):
            if not self._before:
                self._before = [torch.empty_like(tensor) for tensor in update.written]
            for kept, tensor in zip(self._before, update.written, strict=True):
                kept.copy_(tensor)
            self._has_begun = True
            update.take()

    def keep(self) -> None:
        """Have the update be that of a step. Raises what went wrong in the thread."""
        self._end()
        self._update, self._has_begun = None, False

    def wait(self) -> None:
        """Take the update back, if one has begun. Raises what went wrong in the thread, and has taken it back."""
        if self._update is None:
            return
        try:
            self._end()
        finally:
            if self._has_begun:
                for tensor, before in zip(self._update.written, self._before, strict=True):
                    tensor.copy_(before)
                self.unit.params.renew_copy()
            self._update.uncount()
            self._update, self._has_begun = None, False

    def write_back(self) -> None:
        """Do as `wait`: the parameters follow in a step."""
        self.wait()

    def _end(self) -> None:
        if self._running is not None:
            running, self._running = self._running, None
            running.result()
