"""The optimizer step over owned ranges: norm, clip, update, write back."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from launcher.base.errors import EngineAssertionError, EngineError
from launcher.comm import pending
from launcher.comm.groups import RankGroup
from launcher.comm.hosts import AsyncHostCopy, any_rank, host_all_reduce_max
from launcher.comm.mesh import ParallelMesh
from launcher.comm.streams import Side
from launcher.config.policies import Place, ZeroPolicy
from launcher.kernels.api import DeviceScale
from launcher.kernels.cpu import part_of_threads
from launcher.optim.api import DeviceScaled, FlatOptimizer, UnitOptimizer
from launcher.zero.gradients import UnitGradients
from launcher.zero.owned_gradient import measure_all
from launcher.zero.reducer import GradientReducer
from launcher.zero.speculative_update import SpeculativeUpdate
from launcher.zero.tensors import digest
from launcher.zero.unit import FlatUnit, lost_anywhere

# ---- An optimizer that works beside the next forward and backward: the parameters follow one step later ----
# Ren et al., "ZeRO-Offload", https://arxiv.org/abs/2101.06840, section 5.2, "one-step delayed parameter update".


class DelayedUpdate:
    """Takes the steps of one engine in a thread. Every rank must call `begin` and `write_back` in the same order."""

    def __init__(
        self,
        units: Sequence[FlatUnit],
        optimizer: UnitOptimizer,
        policy: ZeroPolicy,
        mesh: ParallelMesh,
    ) -> None:
        self._units = [unit for unit in units if unit.grads is not None]
        self._optimizer = optimizer
        self._mesh = mesh
        self._policy = policy
        self._num_left_in_order = policy.offload.num_steps_in_order
        self._thread = ThreadPoolExecutor(1, "launch-update")
        self._running: Future[None] | None = None
        self.is_written_back = True
        self._unused: Collection[str] = ()  # in the update that is not written back
        for unit in self._units:
            unit.params.pending = self

    def restart(self, num_steps: int) -> None:
        """Continue a run that has taken so many steps: the first ones, which are not delayed, are among them."""
        self._num_left_in_order = max(0, self._policy.offload.num_steps_in_order - num_steps)

    def begin(self, unused: Collection[str], grad_scale: float) -> None:
        """Take the units' gradients over and start a step with them. The step before must have been written back."""
        grads = {unit.index: unit.grads.swap_optimizer_grad() for unit in self._units if unit.grads is not None}
        update = self._optimizer.prepare(grad_scale, unused, grads)
        self.is_written_back, self._unused = False, unused
        self._running = self._thread.submit(self._run, update)
        if self._num_left_in_order > 0:
            self._num_left_in_order -= 1
            self.write_back(is_checked=True)

    def _run(self, update: Callable[[], None]) -> None:
        self._mesh.shard.copier.synchronize()  # copies of the step before may still read what this one writes
        with part_of_threads(self._policy.offload.cores_fraction):
            update()

    def wait(self) -> None:
        """Wait until masters, copies and states are not written any more. Raises what went wrong in the thread."""
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def write_back(self, *, is_checked: bool = False) -> None:
        """Write the updated masters back to the parameters, unless that is done. Collective.

        is_checked: the ranks know that no write into parameters would be lost to it. Raises: EngineError on every rank
        where one has such a write, once.
        """
        if not (is_checked or self.is_written_back):
            self._check_writes()
        self.wait()
        if not self.is_written_back:
            self.is_written_back = True
            for unit in self._units:
                unit.write_back(
                    is_written=self._optimizer.writes_params, overlaps=self._policy.overlap_comm, unused=self._unused
                )

    def _check_writes(self) -> None:
        own = next((error for unit in self._units if (error := unit.find_lost_to_update()) is not None), None)
        for unit in self._units:
            unit.forget_lost()
        is_lost = any_rank(self._mesh.data, [own is not None])
        if self._mesh.model is not None:
            is_lost = any_rank(self._mesh.model, is_lost)
        if is_lost[0]:
            raise lost_anywhere(own, self._mesh)

    def end(self) -> None:
        """Write the last update back and end the thread. Collective."""
        self.write_back(is_checked=True)
        self._thread.shutdown()
        for unit in self._units:
            unit.params.pending = None


# ---- The norm of all gradients, and what follows from it: the factor of clipping, and whether a step is skipped ----


# Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does.
CLIP_EPSILON = 1e-6


@dataclass(frozen=True)
class FirstBad:
    """Where this rank's first gradient is that is not finite, as the device has found it."""

    measured: Sequence[tuple[UnitGradients, int]]  # and where in the owned range what was measured begins
    place: Tensor  # int64 [2]: which of them, and the element in it; -1, -1: all are finite

    def find(self) -> tuple[UnitGradients, int] | None:
        """Return the gradients of its unit, and its element of the owned range; None where all are finite.

        Waits for the device.
        """
        index, element = self.place.tolist()
        if index < 0:
            return None
        gradients, begin = self.measured[index]
        return gradients, begin + element


class StepOutcome:
    """How an optimizer step went, as soon as the host knows it."""

    def __init__(
        self,
        norm: float | AsyncHostCopy,
        *,
        skips_overflow: bool,
        loss_scale: float | None = None,
        compared: Sequence[str] = (),
        first_bad: FirstBad | None = None,
    ) -> None:
        """norm: of all gradients before clipping; or, being copied from the device, the square of what is `loss_scale`
        times as large, how many units differed between ranks before the step, and whether each of `compared` did.

        skips_overflow: a step whose norm is not finite updates nothing. loss_scale: that the step was taken with; None:
        the precision needs none. compared: the labels of units. first_bad: of gradients that have no memory any more.
        """
        self._norm = norm
        self.loss_scale = loss_scale
        self.skips_overflow = skips_overflow
        self._compared = compared
        self.first_bad = first_bad
        self._error: EngineError | None = None

    @property
    def is_known(self) -> bool:
        """Whether the host knows the norm: else `norm` waits for the device."""
        return not isinstance(self._norm, AsyncHostCopy)

    @property
    def norm(self) -> float:
        """The gradient norm before clipping. Raises: EngineError for parameters that differed between ranks."""
        if isinstance(self._norm, AsyncHostCopy):
            square, num_parted, *are_parted = self._norm.values()
            self._norm = math.sqrt(square) / (self.loss_scale or 1.0) if square >= 0 else math.nan
            if num_parted:
                self._error = parted_error(self._compared, are_parted)
        if self._error is not None:
            raise self._error
        return self._norm

    @property
    def is_skipped(self) -> bool:
        """Whether nothing was updated."""
        return self.skips_overflow and not math.isfinite(self.norm)


def parted_error(labels: Sequence[str], are_parted: Sequence[float]) -> EngineError:
    """Return the error for parameters that are not the same on every rank. labels: of the units that were compared."""
    first = next((label for label, is_parted in zip(labels, are_parted, strict=False) if is_parted), "another rank")
    return EngineError(
        f"the parameters of {first} are not the same on every rank: some were written on one rank alone, or with other"
        " values, since the last step",
        hint="write the same on every rank (load_state_dict, param.copy_(...)), or on one rank within"
        " launcher.zero.GatheredParameters(params, modifier_rank=0), which sends its values to all",
    )


def sum_of_squares(gradients: list[UnitGradients], group: RankGroup) -> tuple[Tensor, FirstBad | None]:
    """Return the sum of squares of this rank's share of all gradients, fp64 [1] on the device.

    On a GPU in one launch over all units; on a CPU each unit was measured as its sum arrived, while it was in the cache
    and others were in flight. After the reductions. Returns, too, the first element that is not finite of those that
    were measured in one launch; None where there are none, or no kernel finds it.
    """
    squares = [torch.zeros((), dtype=torch.float64, device=group.device)]
    measured: list[tuple[UnitGradients, int]] = []
    together: list[Tensor] = []
    for own in gradients:
        unmeasured = own.unmeasured
        if unmeasured is None:
            squares.append(own.square.to(group.device))
        for begin, grad in unmeasured or ():
            measured.append((own, begin))
            together.append(grad)
    place = None
    if together:
        total, place = measure_all(together)
        squares.append(total)
    found = None if place is None else FirstBad(measured, place)
    return torch.stack(squares).sum().reshape(1), found


def grad_scale(norm: float, max_norm: float, loss_scale: float) -> float:
    """Return the one number that unscales and clips gradients; `norm` is that of the unscaled ones."""
    coefficient = max_norm / (norm + CLIP_EPSILON) if max_norm > 0 else 1.0
    return min(coefficient, 1.0) / loss_scale


def device_scale(square: Tensor, max_norm: float, loss_scale: float, *, skips_overflow: bool) -> DeviceScale:
    """Return what `grad_scale` returns, and whether to skip, of the square of the norm of the scaled gradients.

    square: fp64 [1], on a device that the host does not wait for.
    """
    norm = square.sqrt().reshape(()) / loss_scale
    factor = torch.ones_like(norm)
    if max_norm > 0:  # divided, as the host does: `max_norm / norm` would multiply by a reciprocal
        factor = torch.full_like(norm, max_norm).div_(norm + CLIP_EPSILON).clamp_(max=1.0)
    skip = ~torch.isfinite(norm) if skips_overflow else torch.zeros_like(norm)
    return DeviceScale((factor / loss_scale).float(), skip.float())


# ---- The step over owned ranges ----


MAX_NAMES = 8  # of unused parameters in an error


@dataclass(frozen=True)
class _OwnFacts:
    """What this rank has before a step, and the others must know."""

    gradients: list[UnitGradients]
    is_touched: bool  # a user has got hold of its whole parameters, and may have written them
    lost: EngineError | None  # about values, written by a user, which the step would lose


@dataclass(frozen=True)
class _StepFacts:
    """What all ranks know after one small collective."""

    norm: float  # 2-norm of all gradients, each element counted once
    num_unused: int  # parameters without a gradient, summed over ranks
    num_late: int  # units with gradients that are not in their sums, summed over ranks
    num_written: int  # units with a `param.grad` that a user has written, summed over ranks
    num_touched: int  # ranks where `_OwnFacts.is_touched` holds
    num_lost: int  # ranks that have an `_OwnFacts.lost`


def _exchange_facts(reducer: GradientReducer, mesh: ParallelMesh, own: _OwnFacts) -> _StepFacts:
    """Return the same facts on every rank, the norm with the same bits. Collective, after the reductions.

    Raises: EngineError on all ranks when their collectives had different orders.
    """
    group, gradients = mesh.data, own.gradients
    if not gradients and mesh.model is None:
        return _StepFacts(0.0, 0, 0, 0, 0, 0)
    total, _ = sum_of_squares(gradients, group)
    num_unused = sum(each.used.count(False) for each in gradients)
    own_counts = [num_unused, reducer.num_late, reducer.num_written, own.is_touched, own.lost is not None]
    counts = [*own_counts, *reducer.order.digests]
    facts = torch.cat([total, torch.tensor(counts, dtype=torch.float64, device=group.device)])
    pending.name_next("the norm of the gradients")
    rows = group.communicator.gather_rows(facts)
    digests = rows[:, 6:]
    has_orders = (digests != digests[0]).any().to(rows.dtype)
    known = torch.cat([rows[:, :6].sum(dim=0), has_orders.reshape(1)])
    if mesh.model is not None:  # before anything follows from it: the ranks of one model do the same then
        known = mesh.model.communicator.sum_scalars(known)
    square, *counts, num_orders = known.tolist()
    if num_orders:
        raise reducer.order.difference(group)
    return _StepFacts(math.sqrt(square / mesh.num_copies), *map(int, counts))


def complete_sums(reducer: GradientReducer, mesh: ParallelMesh, own: _OwnFacts) -> _StepFacts:
    """Wait for the sums of all gradients, late ones included, and return what all ranks know of them. Collective.

    Raises: EngineError on every rank where one has an `own.lost`.
    """
    reducer.complete()
    if mesh.data.runtime.is_async_device and (own.gradients or mesh.model is not None):
        # Before the host waits for its device: behind collectives that do not fit each other nothing ever arrives.
        _share_facts_of_hosts(reducer, mesh, own)
    mesh.data.copier.synchronize()  # gradients in host memory are read from here on
    facts = _exchange_facts(reducer, mesh, own)
    if facts.num_lost:
        raise lost_anywhere(own.lost, mesh)
    if facts.num_late == facts.num_written == 0:
        return facts
    if facts.num_late:
        reducer.reduce_late()
    if facts.num_written:
        reducer.take_written(mesh.data, mesh.model)
    mesh.data.copier.synchronize()
    return _exchange_facts(reducer, mesh, own)


def _share_facts_of_hosts(reducer: GradientReducer, mesh: ParallelMesh, own: _OwnFacts) -> tuple[bool, bool]:
    """Queue the sums of late gradients.

    Returns whether a rank has parameters without a gradient, and whether `own.is_touched` holds on any. Collective; the
    host does not wait for the device. Raises: EngineError as `complete_sums` does.
    """
    is_any_unused = any(not used for each in own.gradients for used in each.used)
    digests = reducer.order.digests
    flags = [is_any_unused, reducer.num_late > 0, reducer.num_written > 0, own.is_touched, own.lost is not None]
    facts = [*map(int, flags), *digests, *(-digest for digest in digests)]
    is_unused, is_late, is_written, is_touched_anywhere, is_lost, *both = host_all_reduce_max(mesh.data, facts)
    parts = any(most != -least for most, least in zip(both[: len(digests)], both[len(digests) :], strict=True))
    if mesh.model is not None:  # before anything follows from it: the ranks of one model do the same then
        flags = [bool(is_unused), bool(is_written), bool(is_touched_anywhere), bool(is_lost), parts]
        is_unused, is_written, is_touched_anywhere, is_lost, parts = any_rank(mesh.model, flags)
    if parts:
        raise reducer.order.difference(mesh.data)
    if is_lost:
        raise lost_anywhere(own.lost, mesh)
    if is_late:
        reducer.reduce_late()
    if is_written:
        reducer.take_written(mesh.data, mesh.model)
        return _share_facts_of_hosts(reducer, mesh, own)
    return bool(is_unused), bool(is_touched_anywhere)


def _values_of(units: list[FlatUnit], device: torch.device) -> torch.Tensor:
    """Return a digest of each unit's parameters, fp64 [units]. units: whole ones, which all ranks should have alike."""
    for unit in units:
        unit.params.wait()
    return (
        torch.stack([digest(unit.params.flat) for unit in units]) if units else torch.zeros(0, device=device).double()
    )


def _check_alike(units: list[FlatUnit], mesh: ParallelMesh) -> None:
    """Raise EngineError on every rank for parameters that are not the same on all. Collective."""
    rows = mesh.data.communicator.gather_rows(_values_of(units, mesh.data.device))
    are_parted = (rows != rows[0]).any(dim=0)
    num_parted = are_parted.sum().double().reshape(1)
    if mesh.model is not None:
        num_parted = mesh.model.communicator.sum_scalars(num_parted)
    if num_parted.item():
        raise parted_error([unit.label for unit in units], are_parted.tolist())


def _unused_anywhere(units: list[FlatUnit], group: RankGroup) -> list[str]:
    """Return the names of parameters that had no gradient on any rank. units: trained ones. Collective."""
    names = [name for unit in units for name in unit.layout.names]
    flags = [used for unit in units if unit.grads is not None for used in unit.grads.used]
    if not names:  # on no rank of the group
        return []
    are_used = any_rank(group, flags)
    return [name for name, is_used in zip(names, are_used, strict=True) if not is_used]


def step_units(
    units: list[FlatUnit],
    reducer: GradientReducer,
    optimizer: FlatOptimizer,
    policy: ZeroPolicy,
    mesh: ParallelMesh,
    loss_scale: float | None,
    delayed: DelayedUpdate | None,
    check: Callable[[list[FlatUnit]], None],
) -> StepOutcome:
    """Take one optimizer step and return how it went. Every rank must call it.

    check: called when the sums of all gradients are complete, before anything is updated. loss_scale: what the
    gradients are too large by; the norm returned is not. None: the precision needs none. When the norm is not finite
    nothing is updated: one bad micro-batch must not destroy the weights. Parameters that had no gradient on any rank
    are left out of the step, weight decay included, as torch does. Raises: EngineError for these where the policy does
    not accept them, and on all ranks where one has a sharded parameter that was written in place, or where their
    collectives had different orders. delayed: what takes the step beside the next one; the parameters get the update of
    the step before.

    On a GPU the host waits for nothing here, where the optimizer can read the scale of gradients there: see the note in
    `launcher.comm.hosts`. It does wait with an optimizer in host memory, and with one whose steps the host takes part
    in.
    """
    trained = [unit for unit in units if unit.grads is not None]
    gradients = [unit.grads for unit in trained if unit.grads is not None]
    alike = [unit for unit in trained if not unit.is_sharded and not unit.members.is_expert]
    watched = alike if optimizer.keeps_ranks_alike else []
    own = _OwnFacts(
        gradients,
        any(unit.params.is_touched or unit.params.first_written() is not None for unit in watched),
        # Raised when all ranks know of it: a rank that left alone would have the others wait for it.
        next((error for unit in trained if (error := unit.find_lost()) is not None), None),
    )
    mesh.data.streams.join(Side.TO_HOST)  # an asynchronous save may still copy what is going to be updated
    for unit in trained:
        unit.sync_external_writes()
        unit.forget_lost()
    for each in gradients:
        each.take_handed_out()
    # The same on all ranks that have one model together: a stage of a pipeline may have frozen parameters only.
    has_gradients = bool(gradients) or mesh.model is not None
    if optimizer.steps_behind_host and has_gradients:
        assert isinstance(optimizer, DeviceScaled), "decided when the engine was built"
        reducer.complete()
        is_any_unused, is_touched = _share_facts_of_hosts(reducer, mesh, own)
        check(trained)
        unused = _unused(trained, policy, mesh) if is_any_unused else []
        compared = alike if is_touched else []
        outcome = _step_behind_host(
            trained, gradients, optimizer, policy, mesh, loss_scale, unused=unused, compared=compared
        )
    else:
        facts = complete_sums(reducer, mesh, own)
        if facts.num_touched:
            _check_alike(alike, mesh)
        check(trained)
        outcome = _step_with_host(trained, facts, optimizer, policy, mesh, loss_scale, delayed, reducer.speculative)
    for unit in watched:
        unit.params.is_touched = False
        unit.params.note_versions()
    for each in gradients:
        each.discard()
        if outcome.first_bad is not None:
            each.give_sum_back()
    reducer.order.begin_step()
    return outcome


def _step_behind_host(
    trained: list[FlatUnit],
    gradients: list[UnitGradients],
    optimizer: DeviceScaled,
    policy: ZeroPolicy,
    mesh: ParallelMesh,
    loss_scale: float | None,
    *,
    unused: Collection[str],
    compared: list[FlatUnit],
) -> StepOutcome:
    """Queue a step whose norm, factor of clipping and skip flag only the device knows.

    compared: units whose parameters are compared between ranks; of a difference the host learns with the norm.
    """
    squares, first_bad = sum_of_squares(gradients, mesh.data)
    rows = mesh.data.communicator.gather_rows(torch.cat([squares, _values_of(compared, squares.device)]))
    are_parted = (rows[:, 1:] != rows[0, 1:]).any(dim=0).double()
    known = torch.cat([rows[:, :1].sum(dim=0) / mesh.num_copies, are_parted.sum().reshape(1)])
    if mesh.model is not None:
        known = mesh.model.communicator.sum_scalars(known)
    skips_overflow = policy.skips_overflow
    outcome = StepOutcome(
        AsyncHostCopy(torch.cat([known, are_parted])),
        skips_overflow=skips_overflow,
        loss_scale=loss_scale,
        compared=[unit.label for unit in compared],
        first_bad=first_bad,
    )
    scale = device_scale(known[:1], policy.max_grad_norm, loss_scale or 1.0, skips_overflow=skips_overflow)
    optimizer.step(scale, frozenset(unused))
    for unit in trained:
        unit.write_back(is_written=optimizer.writes_params, overlaps=policy.overlap_comm, unused=unused)
    return outcome


def _step_with_host(
    trained: list[FlatUnit],
    facts: _StepFacts,
    optimizer: FlatOptimizer,
    policy: ZeroPolicy,
    mesh: ParallelMesh,
    loss_scale: float | None,
    delayed: DelayedUpdate | None,
    speculative: SpeculativeUpdate | None,
) -> StepOutcome:
    """Take a step that the host decides: it knows the norm first."""
    norm = facts.norm / (loss_scale or 1.0)
    unused = _unused(trained, policy, mesh) if facts.num_unused else []
    if delayed is not None:
        delayed.write_back(is_checked=True)
    is_skipped = policy.skips_overflow and not math.isfinite(norm)
    scale = grad_scale(norm, policy.max_grad_norm, loss_scale or 1.0)
    done = () if speculative is None else speculative.finish(scale, is_skipped=is_skipped)
    if not is_skipped:
        if delayed is not None:
            delayed.begin(frozenset(unused), scale)
        else:
            _update(trained, optimizer, policy, frozenset(unused), scale, done)
    return StepOutcome(norm, skips_overflow=policy.skips_overflow, loss_scale=loss_scale)


def _unused(trained: list[FlatUnit], policy: ZeroPolicy, mesh: ParallelMesh) -> list[str]:
    """Return the parameters without a gradient on any rank. Every rank of the model must call it.

    Raises: EngineError on all of them unless there may be such parameters.
    """
    unused = _unused_anywhere(trained, mesh.data)
    is_refused = bool(unused) and not policy.accepts_unused
    if mesh.model is not None and not policy.accepts_unused:
        [is_refused] = any_rank(mesh.model, [is_refused])
    if is_refused:
        raise _unused_error(unused)
    return unused


def _update(
    units: list[FlatUnit],
    optimizer: FlatOptimizer,
    policy: ZeroPolicy,
    unused: Collection[str],
    scale: float,
    done: Collection[int],
) -> None:
    """Update the trained units and write back their parameters, in their order: that of collectives on every rank.

    done: the indices of those that have their update.
    """
    if policy.offload.optimizer is Place.DEVICE:
        optimizer.step(scale, unused)
    else:
        with _part_of_threads(policy.offload.cores_fraction):
            if isinstance(optimizer, UnitOptimizer):
                _update_in_turn(units, optimizer, policy, unused, scale, done)
                return
            optimizer.step(scale, unused)
    for unit in units:
        _write_back(unit, optimizer, policy, unused)


@contextlib.contextmanager
def _part_of_threads(fraction: float) -> Iterator[None]:
    """Let torch, too, use a part of the threads: nothing computes beside this update (see `kernels.cpu`)."""
    if fraction >= 1.0:
        yield
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(1, int(num_threads * fraction)))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _update_in_turn(
    units: list[FlatUnit],
    optimizer: UnitOptimizer,
    policy: ZeroPolicy,
    unused: Collection[str],
    scale: float,
    done: Collection[int],
) -> None:
    """Update one unit after another, in memory for that long; writing back overlaps with the update of the next."""
    swaps = [unit.swap for unit in units]
    for index, unit in enumerate(units):
        swap, gradients = unit.swap, unit.grads
        assert gradients is not None, "trained ones"
        if swap is not None:
            swap.bring_in()
            next_swap = next((later for later in swaps[index + 1 :] if later is not None), None)
            if policy.offload.reads_ahead and next_swap is not None:
                next_swap.start_reading()
        if unit.index not in done:
            optimizer.step_unit(unit.index, gradients.optimizer_grad, scale, unused)
        _write_back(unit, optimizer, policy, unused)
        if swap is not None:
            swap.send_out(unit.state_tensors(), after=unit.group.copier.so_far())


def _write_back(unit: FlatUnit, optimizer: FlatOptimizer, policy: ZeroPolicy, unused: Collection[str]) -> None:
    unit.write_back(is_written=optimizer.writes_params, overlaps=policy.overlap_comm, unused=unused)


def _unused_error(names: list[str]) -> EngineError:
    """names: of this rank's part of the model; none where another part has them."""
    shown = ", ".join(names[:MAX_NAMES]) + (f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else "")
    return EngineAssertionError(
        f"no rank computed a gradient of {shown or 'some parameters of another part of the model'}",
        hint='freeze them with requires_grad_(False), or accept them: "ignore_unused_parameters": true',
    )


def first_bad_gradient(units: list[FlatUnit], group: RankGroup, first_bad: FirstBad | None = None) -> str | None:
    """Return the name of the first parameter whose summed gradient has an element that is not finite.

    first_bad: what the step has found of gradients that have no memory any more. Every rank must call it, after the
    step and before the next backward: until then other gradients are still where they were.
    """
    trained = [(unit, unit.grads) for unit in units if unit.grads is not None]
    first, num_before = (math.inf, ""), 0.0
    found = None if first_bad is None else first_bad.find()
    for unit, own in trained:
        if own.swap is not None:
            own.swap.bring_in()
        for slot, shared in unit.layout.slots_in(unit.owned) if not first[1] else ():
            part = slice(shared.start - unit.owned.start, shared.stop - unit.owned.start)
            if own.has_sum:
                is_bad = not torch.isfinite(own.owned_grad[part]).all()
            else:
                is_bad = found is not None and found[0] is own and part.start <= found[1] < part.stop
            if is_bad:
                first = (num_before + slot.index, slot.name)
                break
        if own.swap is not None:
            own.swap.drop()
        num_before += len(unit.layout.names)
    # With its name: ranks have other experts at one place.
    return min(group.communicator.gather_objects(first))[1] or None
