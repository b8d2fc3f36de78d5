"""Gradients on their way from autograd to their owner, in one order on every rank.

Below stage 3 reductions are the only collectives of a backward pass. Units are reduced strictly from the last to the
first, which is about the order in which backward completes them; a unit that is complete early waits for its turn.

At stage 3 units are gathered in the same pass, and a rank that waits for a reduction must not keep back a gather that
another rank waits for. There a unit is reduced where its modules' backward has passed: see the note in `uses`. What is
left is reduced at the end of the pass, from the last unit to the first.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from launcher.base.errors import EngineError
from launcher.comm import hosts
from launcher.comm.groups import RankGroup
from launcher.comm.streams import Side
from launcher.config.policies import ZeroPolicy
from launcher.zero.gradients import UnitGradients
from launcher.zero.order import Collective, CollectiveOrder
from launcher.zero.speculative_update import SpeculativeUpdate
from launcher.zero.unit import FlatUnit

# Reductions in flight at once. Each holds a full gradient buffer, which stage 2 exists to avoid; two keep the
# network busy while the sum of the one before is taken.
MAX_IN_FLIGHT = 2

# Of all engines of this process.
_running_passes: weakref.WeakSet[GradientReducer] = weakref.WeakSet()
_showing: weakref.WeakSet[GradientReducer] = weakref.WeakSet()  # those that have left something in `param.grad`


class GradientReducer:
    """Starts reductions as units complete and bounds how many are in flight."""

    def __init__(self, units: Sequence[FlatUnit], policy: ZeroPolicy, group: RankGroup, order: CollectiveOrder) -> None:
        """units: all, in forward order. order: notes what is issued here."""
        for unit in units:
            unit.complete_sums = self.complete_early
        self._index_of = {unit.grads: unit.index for unit in units if unit.grads is not None}
        self._gradients = list(self._index_of)
        self.params = [param for unit in units if unit.grads is not None for param in unit.members.params]
        self.order = order
        self._policy = policy
        self.group = group
        self._follows_modules = any(unit.is_sharded for unit in units)
        # Asked at each reduction, alike on every rank: is the next step to get each rank's own gradients? Stage 0 only.
        self.skips_reduction: Callable[[], bool] = lambda: False
        self.gradient_hooks: list[RemovableHandle] = []  # by which autograd hands over
        self._hides: list[GradientReducer] = []  # whose gradients this pass must not add to
        self._in_backward = False
        self._is_scripts = False  # the pass is one that no engine was asked for: all engines in its graph take part
        self.is_spoiled = False  # a pass that no engine runs has added to sums that `param.grad` showed
        self._reduces = False
        self._is_boundary = False
        self._unsent: dict[UnitGradients, None] = {}  # not reduced yet in this pass, from the last to the first
        self._in_flight: list[UnitGradients] = []
        self.speculative: SpeculativeUpdate | None = None  # what updates a unit when its sum is complete
        self._advanced: list[UnitGradients] = []  # in the last phase of their reduction

    def begin_backward(self, *, is_boundary: bool, factor: float = 1.0, is_scripts: bool = False) -> None:
        """Prepare for one backward pass; `is_boundary` says that a step follows it.

        factor: what its gradients are multiplied by. is_scripts: it is a `loss.backward()` of the script's own.
        """
        self._finish_all()  # sums of the micro-batch before may have been in flight during this forward
        if self.speculative is not None:
            self.speculative.begin_backward(is_boundary=is_boundary)
        _showing.discard(self)  # another engine's pass that begins within this one must not hide, and show, it
        self._hides = list(_showing)
        for other in self._hides:
            other.withdraw()
        for handle in self.gradient_hooks:
            _move_to_end(handle)
        self._in_backward = True
        self._is_scripts = is_scripts
        _running_passes.add(self)
        self._is_boundary = is_boundary
        self._reduces = is_boundary or self._policy.stage.shards_gradients
        self._unsent = dict.fromkeys(reversed(self._gradients))
        is_reduced = self._reduces and not self.skips_reduction()
        for gradients in self._gradients:
            gradients.begin_backward(is_reduced=is_reduced, factor=factor)

    def take_gradient(self, gradients: UnitGradients, index: int) -> None:
        """Take the gradient of one parameter over from autograd."""
        if not self._in_backward:
            self._drop_foreign(gradients, index)
            return
        gradients.take(index)
        if self._reduces and self._policy.overlap_comm and not self._follows_modules:
            while self._unsent and (oldest := next(iter(self._unsent))).is_complete:
                self._reduce(oldest)

    def collect_untracked_grads(self) -> None:
        """Take over the gradients that were written to parameters past autograd's hooks, within a backward pass."""
        for gradients in self._gradients:
            for index in range(len(gradients.used)):
                self.take_gradient(gradients, index)

    def _drop_foreign(self, gradients: UnitGradients, index: int) -> None:
        """Drop a gradient that the backward pass of another engine has left on this one's parameter.

        A generator's loss goes back through the discriminator, whose gradients of it are not used: a plain loop calls
        `zero_grad()` before the discriminator's own backward. Raises: EngineError when no engine runs the pass.
        """
        is_in_sum = gradients.drop(index)
        if not self.is_beside:
            self.is_spoiled |= is_in_sum
            raise EngineError(
                "a backward pass reached parameters of an engine that it did not begin at: the loss was not computed"
                " from what engine(...) returned",
                hint="compute it from engine(...), not from engine.module(...), or call engine.backward(loss)",
            )

    @property
    def is_beside(self) -> bool:
        """Whether the pass that runs is another engine's own: gradients that it leaves here are not used."""
        return any(not other._is_scripts for other in _running_passes if other is not self)

    def after_backward(self, gradients: UnitGradients) -> None:
        """Reduce a sharded unit: the backward of every module that reads it has passed."""
        if self._in_backward and self._reduces and self._policy.overlap_comm and gradients in self._unsent:
            self._reduce(gradients)

    def end_backward(self) -> None:
        """Reduce what is left: units with unused parameters, or everything without overlap."""
        self._in_backward = False
        _running_passes.discard(self)
        while self._reduces and self._unsent:
            self._reduce(next(iter(self._unsent)))
        for gradients in () if self._reduces else self._gradients:
            gradients.end_backward()

    def leave(self, *, shows: bool) -> None:
        """Leave in `param.grad`, after a pass, what users may find there until `withdraw`. shows: whether to leave any.

        Where views of whole gradients are left, these must be complete: they are waited for.
        """
        if shows and any(gradients.is_shown for gradients in self._gradients):
            self.wait()
        for gradients in self._gradients:
            gradients.leave(shows=shows)
        if shows:
            _showing.add(self)
        self._unhide()

    def _unhide(self) -> None:
        """Have other engines show again what this pass has hidden, unless a pass of their own is to show it, or has."""
        for other in self._hides:
            if other not in _showing and not other._in_backward:
                other.leave(shows=True)
        self._hides = []

    def withdraw(self) -> None:
        """Take out of `param.grad` what was left there, and note what users have made of it."""
        _showing.discard(self)
        for gradients in self._gradients:
            gradients.withdraw()

    @property
    def num_written(self) -> int:
        """The units of this rank for which a user has written to `param.grad`."""
        return sum(gradients.has_written for gradients in self._gradients)

    def take_written(self, group: RankGroup, model: RankGroup | None) -> None:
        """Have gradients that users wrote to `param.grad` replace the sums, which are complete. Collective.

        For a step that knows that there are some. group: the ranks that have the same parameters. model: those that
        have one model together and call it too, or None. Raises: EngineError on all unless a group wrote the same.
        """
        own = torch.tensor([row for gradients in self._gradients for row in gradients.written()], dtype=torch.float64)
        rows = group.communicator.gather_rows(own.view(-1).to(group.device))
        is_bad = (rows != rows[0]).any(dim=0)  # NaN is unlike itself
        num_bad = is_bad.sum().double().reshape(1)
        if model is not None:
            num_bad = model.communicator.sum_scalars(num_bad)
        if num_bad.item():
            names = [name for gradients in self._gradients for name in gradients.names]
            here = [name for name, bad in zip(names, is_bad.view(-1, 2).any(dim=1).tolist(), strict=True) if bad]
            raise _written_error(here[0] if here else "a parameter of another rank")
        self._roll_back()
        for gradients in self._gradients:
            gradients.take_written()

    @property
    def num_late(self) -> int:
        """The units of this rank that got gradients after their sum was begun.

        Reentrant checkpointing runs backward passes within the backward pass. Each of them delivers the gradients of
        what it has used, so what several of them use gets several gradients. Which units these are, and whether there
        are any, may differ between ranks: they are counted with the norm, and all ranks call `reduce_late` together.
        """
        return sum(gradients.has_late for gradients in self._gradients)

    def reduce_late(self) -> None:
        """Add the late gradients of all ranks to the sums. Collective; for a step that knows that there are some."""
        has_late = hosts.any_rank(self.group, [gradients.has_late for gradients in self._gradients])
        self._roll_back()
        self.wait()
        for gradients, is_late in reversed(list(zip(self._gradients, has_late, strict=True))):
            if is_late:
                self._make_room()
                gradients.reduce_late()
                self._in_flight.append(gradients)
        self.wait()

    def complete(self) -> None:
        """Reduce and wait for, before a step, what the last backward pass did not: it was not known to be the last."""
        if not self._reduces:
            self._reduces = self._is_boundary = True
            self._unsent = dict.fromkeys(reversed(self._gradients))
            self.end_backward()
        self.wait()
        for gradients in self._gradients:
            gradients.complete_sum()

    def complete_early(self) -> None:
        """Do as `complete` where a backward pass has left gradients: their sums are read before a step.

        Every rank must call it. Further backward passes add to the sums.
        """
        if not self._in_backward and (self._reduces or self._unsent):
            self.complete()

    def abort_backward(self) -> None:
        """Leave a backward pass that an exception ended."""
        self._roll_back()
        self._in_backward = False
        self._unhide()
        _running_passes.discard(self)
        for gradients in self._gradients:
            gradients.drop_late()

    def discard(self) -> None:
        """Drop all gradients since the last step. Every rank must call it."""
        self._roll_back()
        self.wait()
        self.is_spoiled = False
        _showing.discard(self)
        self._unsent.clear()
        for gradients in self._gradients:
            gradients.discard()

    def wait(self) -> None:
        """Wait for every reduction that was started; on a GPU the computing does, and the host does not."""
        self._finish_all()
        self.group.streams.join(Side.REDUCE)
        self.group.buffers.reclaim()  # nothing is left to wait for: the optimizer may have the memory

    def _finish_all(self) -> None:
        while self._in_flight:
            self._advance_oldest()
        for gradients in self._advanced:
            self._finish(gradients)
        self._advanced.clear()

    def _advance_oldest(self) -> None:
        oldest = self._in_flight.pop(0)
        if not self._policy.stage.shards_optimizer and not self.group.streams.is_async and oldest.advance_reduction():
            self._advanced.append(oldest)  # the sum is on its way back to every rank, and what was sent is free
        else:  # the norm is taken while further reductions are in flight
            self._finish(oldest)

    def _finish(self, gradients: UnitGradients) -> None:
        gradients.finish_reduction(measure=self._is_boundary)
        if self.speculative is not None:
            self.speculative.start(gradients)

    def _roll_back(self) -> None:
        if self.speculative is not None:
            self.speculative.roll_back()

    def _reduce(self, gradients: UnitGradients) -> None:
        self._make_room()
        del self._unsent[gradients]
        self.order.note(Collective.REDUCTION, self._index_of[gradients])
        gradients.start_reduction(is_last=self._is_boundary, skips_reduction=self.skips_reduction())
        self._in_flight.append(gradients)

    def _make_room(self) -> None:
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._advance_oldest()


def _move_to_end(handle: RemovableHandle) -> None:
    """Have the engine's hook run last: hooks that were registered after it see the gradient too."""
    hooks: OrderedDict[int, Any] | None = handle.hooks_dict_ref()
    if hooks is not None and len(hooks) > 1 and handle.id in hooks and next(reversed(hooks)) != handle.id:
        hooks[handle.id] = hooks.pop(handle.id)  # C++ reads the order of the dict under it, not `move_to_end`'s


def _written_error(name: str) -> EngineError:
    return EngineError(
        f"param.grad of {name} was set where it cannot replace the engine's gradient: at stage 3, before a"
        " further backward, or not alike on every rank",
        hint="call launcher.zero.safe_set_full_grad(param, value) on every rank, with the same value, between the last"
        " engine.backward() and engine.step()",
    )
