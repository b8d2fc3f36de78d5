"""What follows from an optimizer step once the host knows its norm: at once, or while the device is behind."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.comm.groups import RankGroup
from launcher.comm.mesh import ParallelMesh
from launcher.engine.optimizer import ZeroOptimizer
from launcher.journal.rank import own_journal
from launcher.optim.api import DeviceScaled, options_of
from launcher.optim.schedules import ScheduleStep
from launcher.zero.step import StepOutcome, first_bad_gradient
from launcher.zero.unit import FlatUnit


def reason(
    units: list[FlatUnit], group: RankGroup, losses: list[Tensor], outcome: StepOutcome
) -> tuple[str, str | None]:
    """Name the ranks whose loss is not finite, or else the parameter whose gradient is not. Every rank must call it.

    losses: of this rank's micro-batches since the last step, as far as the engine has seen any. Returns a text, and the
    parameter.
    """
    mean = torch.stack([loss.float() for loss in losses]).mean().item() if losses else 0.0
    by_rank = group.communicator.gather_scalars(mean)
    bad = [f"{loss} on rank {rank}" for rank, loss in enumerate(by_rank) if not math.isfinite(loss)]
    if bad:
        return f"the loss is {', '.join(bad[:8])}", None
    first = first_bad_gradient(units, group, outcome.first_bad)
    return f"the gradient norm is {outcome.norm}" + (f", first in {first}" if first else ""), first


@dataclass
class _Step:
    number: int
    outcome: StepOutcome
    losses: list[Tensor]  # of this rank's micro-batches
    before: tuple[Any, Any, list[dict[str, Any]]] | None = None  # the schedule, its state, and the options of groups
    is_known: bool = False
    is_reported: bool = False
    scale_says: str | None = None  # about an overflow
    scale_error: EngineError | None = None  # the scale cannot get smaller, and steps overflow all the same


class LastStep:
    """The last optimizer step: the norm, whether it was skipped, and the schedule, counters and messages that follow.

    [Note: a step that the device has not taken yet]
    Where `StepOutcome.is_known` is false the engine continues as after a good step: the schedule moves, counters count.
    What is read of the step waits for the norm (`wait_for_outcome`), and takes the schedule and the counters back if
    the device has skipped the update. That is local to a rank, so each may read when it likes. Why a norm is not finite
    is found together (`report`), when every rank begins the next backward: then the gradients are still where they
    were, or the step has searched them. The device has the update and the next forward to work on while the host waits
    for a norm that came before both.
    """

    def __init__(self, units: list[FlatUnit], optimizer: ZeroOptimizer | None, mesh: ParallelMesh) -> None:
        self._units = units
        self._optimizer = optimizer
        self._group = mesh.data
        # Of the ranks of a pipeline that with the last layers: backward begins there.
        is_last = mesh.pipeline is None or mesh.pipeline.rank == mesh.pipeline.world_size - 1
        self._says_why = is_last and mesh.data.rank == 0 and (mesh.tensor is None or mesh.tensor.rank == 0)
        self._step: _Step | None = None
        self._named: str | None = None  # the parameter whose gradient was not finite in the step before
        self._num_skipped = 0
        if optimizer is not None:
            optimizer.wait_for_outcome = self.wait_for_outcome

    @property
    def norm(self) -> float | None:
        """The gradient norm of the last step before clipping; inf where it was skipped; None before the first."""
        self.wait_for_outcome()
        if self._step is None:
            return None
        return math.inf if self._step.outcome.is_skipped else self._step.outcome.norm

    @property
    def loss_scale(self) -> float | None:
        """The loss scale that the last step was taken with; None where the precision needs none."""
        return None if self._step is None else self._step.outcome.loss_scale

    @property
    def num_skipped(self) -> int:
        """The steps that updated nothing."""
        self.wait_for_outcome()
        return self._num_skipped

    @property
    def outcome(self) -> Callable[[], tuple[float | None, bool]]:
        """What returns the norm of the last step, and whether nothing was updated. It waits for the device."""
        step = self._step

        def found() -> tuple[float | None, bool]:
            try:
                return (None, False) if step is None else (step.outcome.norm, step.outcome.is_skipped)
            except EngineError:  # parameters that differ between ranks: the next backward raises it on all of them
                return None, False

        return found

    def restart(self, num_skipped: int) -> None:
        """Forget the last step: the run continues from elsewhere, where so many steps had updated nothing."""
        self._step = None
        self._num_skipped = num_skipped

    def begin(self, number: int, outcome: StepOutcome, losses: list[Tensor], schedule: ScheduleStep) -> None:
        """Follow a step. Every rank must call it. number: of the step, from 1. schedule: of learning rates.

        Raises: EngineError when the loss scale cannot get smaller and steps overflow all the same.
        """
        assert self._optimizer is not None
        step = self._step = _Step(number, outcome, losses)
        if outcome.is_known:
            self._follow_scale(step)
            self.report()
            self._num_skipped += outcome.is_skipped
            if not outcome.is_skipped:
                schedule.take()
            return
        self._optimizer.note_step(overflow=False)
        if outcome.skips_overflow and schedule.is_taken:
            if not hasattr(schedule.schedule, "load_state_dict"):  # it only steps forward: it must know first
                self.wait_for_outcome()
                if outcome.is_skipped:
                    return
            else:
                step.before = (
                    schedule.schedule,
                    copy.deepcopy(schedule.schedule.state_dict()),
                    [options_of(group, copies=True) for group in self._optimizer.param_groups],
                )
        schedule.take()

    def _follow_scale(self, step: _Step) -> None:
        """Have the loss scale follow a step, alike on every rank. An error of it is raised where all are: `report`."""
        assert self._optimizer is not None
        step.is_known = True
        scaler, is_skipped = self._optimizer.loss_scaler, step.outcome.is_skipped
        if scaler is not None:
            try:
                step.scale_says = scaler.update(overflow=is_skipped)
            except EngineError as error:
                step.scale_error = error

    def wait_for_outcome(self) -> None:
        """Wait for the norm of the last step; if the device has skipped it, take back what was counted of it."""
        step = self._step
        if step is None or step.is_known:
            return
        self._follow_scale(step)
        if not step.outcome.is_skipped:
            return
        assert self._optimizer is not None
        self._num_skipped += 1
        self._optimizer.overflow = True
        if step.before is not None:
            schedule, state, options = step.before
            schedule.load_state_dict(state)
            for group, before in zip(self._optimizer.param_groups, options, strict=True):
                group.update(before)
        if isinstance(self._optimizer.flat, DeviceScaled):
            self._optimizer.flat.take_back()

    def report(self) -> None:
        """Say why the last norm is not finite, if it is not and that was not said. Collective.

        Raises: EngineError when the loss scale cannot get smaller and steps overflow all the same, and for parameters
        that were written on one rank alone.
        """
        step = self._step
        if step is None or step.is_reported:
            return
        step.is_reported = True
        self.wait_for_outcome()
        assert self._optimizer is not None
        norm, is_skipped = step.outcome.norm, step.outcome.is_skipped
        is_finite = math.isfinite(norm)
        why, parameter = "", None
        if not is_finite:
            why, parameter = reason(self._units, self._group, step.losses, step.outcome)
        named, self._named = self._named, parameter
        journal = own_journal() if parameter not in (None, named) and step.outcome.loss_scale is None else None
        if journal is not None:
            journal.add("nonfinite", step=step.number, what="gradient", module=parameter, last_finite=None)
        self._optimizer.note_step(overflow=is_skipped)
        if step.scale_error is not None:
            raise step.scale_error
        if not is_finite and self._says_why:
            text = f"step {step.number} {'skipped' if is_skipped else 'taken all the same'}: {why}"
            get_logger().warning("%s", f"{step.scale_says} ({text})" if step.scale_says else text)
