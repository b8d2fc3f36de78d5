"""Updates in host memory that begin when the gradient of a unit has arrived, beside the backward pass of the others.

Lian et al., "SuperOffload", https://arxiv.org/abs/2509.21271: speculation, then validation, and a rollback where the
update turns out to be another one.

[Note: the same bits as a step that waits]
What a unit's update needs of all others is one number, what gradients are multiplied by. It is 1 / loss scale, unless
their norm is above the limit; that, and whether the step is skipped, is known when the last gradient has arrived. Until
the step has validated the number, a copy of masters and states from before the update is kept. Where the number is
another one, or a gradient, a hyper-parameter or a master is read or written in the meantime, the copy is written back,
and the step takes the update as it does without this. Each rank decides that by itself: an update in host memory is no
collective, and only a step copies masters to the parameters.

A step that was clipped is mostly followed by another one, which then waits: no update is taken twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from launcher.base.log import get_logger
from launcher.comm.streams import StreamEvent
from launcher.config.policies import Place
from launcher.kernels.cpu import part_of_threads, scaled_copy
from launcher.optim.api import PreparedUpdate, UnitOptimizer
from launcher.zero.gradients import UnitGradients
from launcher.zero.unit import FlatUnit


class SpeculativeUpdate:
    """Takes updates of one engine in a thread. Nothing here is collective; the training thread alone may call it."""

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
        self._thread = ThreadPoolExecutor(1, "launch-update")
        self._of: dict[UnitGradients, _UnitSpeculation] = {}
        for unit in units:
            if unit.grads is not None and unit.grads.place is Place.HOST:
                self._of[unit.grads] = unit.params.pending = _UnitSpeculation(unit, cores_fraction)
        self._may_start = False
        self._scale = 1.0  # of the updates that have begun in this pass
        self._options: list[dict[str, Any]] = []  # of the optimizer's groups when they began
        self._was_clipped = False
        self._has_failed = False
        self.num_kept = 0  # updates of units that steps have validated
        self.num_rolled_back = 0

    def begin_backward(self, *, is_boundary: bool) -> None:
        """Roll back what has begun: gradients are going to change. is_boundary: a step follows the pass."""
        self.roll_back()
        self._may_start = is_boundary and not (self._was_clipped or self._has_failed)

    def start(self, gradients: UnitGradients) -> None:
        """Start the update of a unit whose sum is complete, or on its way to host memory."""
        of_unit = self._of.get(gradients)
        if of_unit is None or not self._may_start or of_unit.has_begun or not of_unit.is_final:
            return
        if not any(each.has_begun for each in self._of.values()):
            self._scale = 1.0 / self._loss_scale()
            self._options = self._optimizer.saved_groups()
        update = self._optimizer.prepare_unit(of_unit.index, gradients.optimizer_grad, self._scale)
        of_unit.start(self._thread, update)

    def finish(self, scale: float, *, is_skipped: bool) -> Collection[int]:
        """Return the indices of the units that have the update of this step; roll the others back, or cancel them.

        scale: what the step multiplies gradients by. An update that has failed is rolled back, too: the step takes it
        again, and raises what that raises.
        """
        self._may_start = False
        self._was_clipped = not is_skipped and scale != 1.0 / self._loss_scale()
        for each in self._of.values():
            each.cancel()
        begun = [each for each in self._of.values() if each.has_begun]
        is_valid = not is_skipped and scale == self._scale and self._options == self._optimizer.saved_groups()
        if not is_valid:
            self.roll_back()
            return ()
        kept = [each.index for each in begun if self._keeps(each)]
        self.num_kept += len(kept)
        self.num_rolled_back += len(begun) - len(kept)
        return kept

    def _keeps(self, of_unit: _UnitSpeculation) -> bool:
        error = of_unit.keep()
        if error is not None and not self._has_failed:
            self._has_failed = True
            get_logger().warning(
                "super_offload: an update beside backward has failed (%s): from here on updates wait for the norm. It"
                " takes host memory for a second set of masters and states",
                str(error) or type(error).__name__,
            )
        return error is None

    def roll_back(self) -> None:
        """Roll back every update that has begun, and start no further one in this pass."""
        self._may_start = False
        for each in self._of.values():
            self.num_rolled_back += each.has_begun
            each.wait()

    def end(self) -> None:
        """Roll back what has begun and end the thread."""
        self.roll_back()
        self._thread.shutdown()
        for each in self._of.values():
            each.unit.params.pending = None


class _UnitSpeculation:
    """The update of one unit that may have begun. As `UnitParameters.pending` it is waited for by rolling it back.

    The parameters are those of the last step: they do not follow until the next one.
    """

    is_written_back = True

    def __init__(self, unit: FlatUnit, cores_fraction: float) -> None:
        self.unit = unit
        self.index = unit.index
        self._cores_fraction = cores_fraction
        self._update: PreparedUpdate | None = None  # that has begun
        self._running: Future[None] | None = None
        self._before: list[Tensor] = []  # 1-D each, what the update writes, as it was; the memory is used again
        self._is_copied = False  # `_before` has the values from before this update

    @property
    def has_begun(self) -> bool:
        """Whether there is an update that no step has validated."""
        return self._update is not None

    @property
    def is_final(self) -> bool:
        """Whether nothing but a user's own writes can change the gradient, or the master, before the step."""
        grads, params = self.unit.grads, self.unit.params
        assert grads is not None
        is_edited = params.may_be_edited or params.first_written() is not None  # the step takes it over first
        return all(grads.used) and not (grads.has_late or grads.is_incomplete or is_edited)

    def start(self, thread: ThreadPoolExecutor, update: PreparedUpdate) -> None:
        """Have the thread take the update when the gradient has arrived."""
        assert self.unit.grads is not None
        self._update = update
        self._running = thread.submit(self._run, update, self.unit.grads.arrival)

    def _run(self, update: PreparedUpdate, arrival: StreamEvent) -> None:
        arrival.synchronize()
        with part_of_threads(self._cores_fraction):
            if not self._before:
                self._before = [torch.empty_like(tensor) for tensor in update.written]
            for kept, tensor in zip(self._before, update.written, strict=True):
                scaled_copy(kept, tensor, 1.0)  # past the caches
            self._is_copied = True
            update.take()

    def cancel(self) -> None:
        """Forget an update that the thread has not come to: the step takes it without a copy of what was before."""
        if self._update is not None and self._running is not None and self._running.cancel():
            self._update.uncount()
            self._forget()

    def keep(self) -> BaseException | None:
        """Have the update be that of a step; return None, or its error where it has failed and is rolled back."""
        assert self._running is not None
        error = self._running.exception()
        if error is not None:
            self.wait()
        self._forget()
        return error

    def wait(self) -> None:
        """Roll the update back, if one has begun. Raises nothing: what has failed is rolled back, too."""
        if self._update is None or self._running is None:
            return
        self._running.exception()
        if self._is_copied:
            for tensor, before in zip(self._update.written, self._before, strict=True):
                scaled_copy(tensor, before, 1.0)
            self.unit.params.renew_copy()
        self._update.uncount()
        self._forget()

    def write_back(self) -> None:
        """Do as `wait`: the parameters follow in a step."""
        self.wait()

    def _forget(self) -> None:
        self._update, self._running, self._is_copied = None, None, False
