"""When units are unsharded and when they are released: around each use, ahead of it, and not longer than needed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import torch

from launcher.base.errors import EngineError
from launcher.comm.groups import RankGroup
from launcher.comm.torch_internals import is_in_backward
from launcher.config.policies import ParameterPolicy
from launcher.zero.order import EVALUATION_HINT, Collective, CollectiveOrder
from launcher.zero.states import ParameterState
from launcher.zero.unit import FlatUnit

# ---- Which backward passes still read a unit. Known from the modules' paths alone, so it is alike on every rank ----
# [Note: one order on every rank] Gathers and reductions are collectives: all ranks must issue them in one order.
# Which parameters get a gradient, and when, may differ between ranks (each rank's data chooses its experts). Which
# modules run, and in which order, may not: that is the contract of stage 3. So everything that is issued within
# backward follows the modules: a unit is gathered when the gradient of its module's output arrives, and it is reduced
# and released when the gradients of its module's inputs are complete. A unit that several modules read waits for the
# last of them.
#
# [Note: no object's lifetime] A use whose backward never comes keeps its unit from being reduced before the pass
# ends. It counts although its graph may be gone: when Python frees a graph depends on its garbage collector, and on
# what this rank keeps. A use that has not gone back is forgotten at the step. If it goes back all the same, it counts
# again, and gradients that come after the reduction are added before the step.


class Use:
    """One forward of a module that reads units, until its backward has passed."""

    def __init__(self, units: Sequence[FlatUnit], *, is_cast: bool, is_copy: bool = False) -> None:
        """is_copy: checkpointing runs the forward again for its values; the graph of the first one goes back.

        is_cast: the units were gathered as torch.autocast casts them.
        """
        self.units = units
        self.is_copy = is_copy
        self.is_cast = is_cast


class OpenUses:
    """The uses whose backward has not passed, by unit."""

    def __init__(self, num_units: int) -> None:
        self._open: list[set[Use]] = [set() for _ in range(num_units)]
        self._in_backward: list[set[Use]] = [set() for _ in range(num_units)]
        self._until_end: set[Use] = set()
        self._unrecorded: dict[object, list[Use]] = {}  # by the reader of the module

    def open(self, use: Use, *, until_end: bool = False) -> None:
        """Count a use. until_end: nothing will say when its backward has passed, before the whole pass ends."""
        for unit in use.units:
            self._open[unit.index].add(use)
        if until_end:
            self._until_end.add(use)

    def open_unrecorded(self, use: Use, reader: object) -> None:
        """Count the forward of a segment that reentrant checkpointing is going to run again within backward.

        Autograd does not record it, which is also so for a look at the model; then it stays open until the pass ends.
        """
        self.open(use, until_end=True)
        self._unrecorded.setdefault(reader, []).append(use)

    def take_unrecorded(self, reader: object) -> Use | None:
        """Return the use whose forward runs again now, the last first; it is the graph's from here on."""
        uses = self._unrecorded.get(reader)
        if not uses:
            return None
        use = uses.pop()
        self._until_end.discard(use)
        return use

    def begin_backward(self, use: Use) -> None:
        """Note that the backward of a use begins; once more, when a retained graph goes back a second time."""
        for unit in use.units:
            self._open[unit.index].add(use)
            self._in_backward[unit.index].add(use)

    def close(self, use: Use) -> tuple[list[FlatUnit], list[FlatUnit]]:
        """Note that the backward of a use has passed.

        Returns the units of which no backward is under way, and of these the ones that no backward to come reads.
        """
        for unit in use.units:
            self._open[unit.index].discard(use)
            self._in_backward[unit.index].discard(use)
        idle = [unit for unit in use.units if not self._in_backward[unit.index]]
        return idle, [unit for unit in idle if not self._open[unit.index]]

    def end_pass(self) -> None:
        """Close what has begun to go back, and what stays open until a pass ends. Other graphs may go back yet."""
        for use in self._until_end.union(*self._in_backward):
            self.close(use)
        self._until_end.clear()
        self._unrecorded.clear()

    def forget(self) -> None:
        """Close all uses."""
        for uses in self._open:
            uses.clear()
        self.end_pass()


# ---- In which order units are used, learnt from the pass before: what to fetch ahead and what to keep. Pure ----


class Trace:
    """The uses of one pass (unit indices, in order) with the distance of each to the unit's next use."""

    def __init__(self, uses: Sequence[int], numels: Sequence[int]) -> None:
        """numels: elements of every unit, by its index."""
        self.uses = tuple(uses)
        # Elements used before each position: distances are differences of these.
        before = [0, *itertools.accumulate(numels[unit] for unit in self.uses)]
        next_position: dict[int, int] = {}
        self._reuse_distances: list[int | None] = [None] * len(self.uses)
        for position in range(len(self.uses) - 1, -1, -1):
            unit = self.uses[position]
            later = next_position.get(unit)
            if later is not None:
                self._reuse_distances[position] = before[later] - before[position + 1]
            next_position[unit] = position

    def reuse_distance(self, position: int) -> int | None:
        """Return the elements used between the use at `position` and the unit's next one; None: it is the last."""
        return self._reuse_distances[position]


class TraceFollower:
    """Follows a pass along the trace of the one before, and records it.

    When the model takes another path there is nothing to predict until the pass ends; its record is the next
    prediction. Passes of a kind (training, evaluation) are compared with each other only.
    """

    def __init__(self, numels: Sequence[int]) -> None:
        self._numels = numels
        self._traces: dict[str, Trace] = {}
        self.kind: str | None = None  # of the pass that runs
        self._expected: Trace | None = None
        self._recorded: list[int] = []
        self._positions: dict[int, int] = {}  # unit -> position of its latest use
        self.num_misses = 0  # passes that left the expected path

    @property
    def is_open(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self.kind is not None

    @property
    def num_recorded(self) -> int:
        """Uses in the pass so far."""
        return len(self._recorded)

    def begin(self, kind: str) -> None:
        """Begin a pass of a kind."""
        self.kind = kind
        self._expected = self._traces.get(kind)
        self._recorded = []
        self._positions = {}

    def record(self, unit: int) -> None:
        """Note that `unit` is used now."""
        position = len(self._recorded)
        self._recorded.append(unit)
        self._positions[unit] = position
        expected = self._expected
        if expected is not None and (position >= len(expected.uses) or expected.uses[position] != unit):
            self._expected = None
            self.num_misses += 1

    def upcoming(self, offset: int) -> int | None:
        """Return the unit that will be used after `offset` others; None: it is not known, or the pass ends before."""
        position = len(self._recorded) + offset
        if self._expected is None or position >= len(self._expected.uses):
            return None
        return self._expected.uses[position]

    def reuse_distance(self, unit: int) -> int | None:
        """Return the elements used before `unit` is used again in this pass; None: never, or not known."""
        if self._expected is None or unit not in self._positions:
            return None
        return self._expected.reuse_distance(self._positions[unit])

    def end(self) -> None:
        """End the pass; its record predicts the next one of its kind."""
        left_early = self._expected is not None and len(self._recorded) < len(self._expected.uses)
        if self.kind is not None and (self._expected is None or left_early):
            self._traces[self.kind] = Trace(self._recorded, self._numels)
        self.kind = None
        self._expected = None
        self._recorded = []


# ---- When units are unsharded and when they are released ----


_TRAINING, _EVALUATION = "training", "evaluation"


# Uses that are recorded in one pass: a forward whose backward never comes does not end one.
MAX_RECORDED = 100_000


class ParameterSchedule:
    """Unshards units before their use and shards them after it.

    A pass is a forward and its backward, or a forward without one. All ranks must use the same units in the same
    order: gathering is collective. Units that are never sharded are only waited for.
    """

    def __init__(
        self,
        units: list[FlatUnit],
        policy: ParameterPolicy,
        order: CollectiveOrder | None = None,
        group: RankGroup | None = None,
    ) -> None:
        """order: notes what is issued here. group: the ranks that use the units together; None: this one alone."""
        self._order = order
        self._group = group
        self._units = units
        self._policy = policy
        self._follower = TraceFollower([unit.numel for unit in units])
        self._has_sharded = any(unit.is_sharded for unit in units)
        self._running: list[list[FlatUnit]] = []  # what each module reads whose forward runs, the innermost last
        self._uses = [0] * len(units)  # how many of these read each unit
        self._in_backward = False
        self._is_broken = False  # an exception ended a forward: units may still be gathered, or on their way
        self._open_uses = OpenUses(len(units))
        self._live: set[int] = set()  # units unsharded from here; what the user gathers is the user's to release
        self._live_numel = 0
        self._reading: set[int] = set()  # units whose shards were read ahead of being fetched
        self._thread = threading.current_thread()  # that runs the model
        for unit in units:
            unit.params.check_thread = self._check_thread
        self._is_cast = False  # the last outermost forward ran under torch.autocast
        self._ahead = 0  # how many of the upcoming uses have been looked at
        self._ahead_numel: dict[int, int] = {}  # units fetched ahead and not used yet -> elements
        self.peak_live_numel = 0

    @property
    def live_numel(self) -> int:
        """Elements of sharded units that are unsharded or being gathered."""
        return self._live_numel

    @property
    def num_path_changes(self) -> int:
        """Passes so far that did not use the units in the recorded order."""
        return self._follower.num_misses

    # ---- forward ----

    def before_forward(self, units: list[FlatUnit]) -> None:
        """Unshard `units`: the forward of the module that reads them is about to run.

        Units that the forward reads besides, of other modules, are added to the list: from then on they are fetched
        with the module.
        """
        if not self._running and not self._in_backward:
            self._thread = threading.current_thread()
            if self._is_broken:
                if self._order is not None and self._has_sharded and self._group is not None:
                    self._order.rendezvous(self._group, "forward")
                self.reset()
            elif self._follower.num_recorded > MAX_RECORDED:  # forwards that autograd records, and no backward
                self._end_pass()
                self._open_uses.forget()
            if self._has_sharded:
                self._is_cast = torch.is_autocast_enabled(self._units[0].group.device.type)
        self._running.append(units)
        for unit in units:
            self._count(unit, 1)
        self._use(units)

    def open_use(self, units: Sequence[FlatUnit], reader: object, *, is_training: bool) -> Use | None:
        """Note a forward whose backward reads `units` again; None for one that has no backward.

        is_training: the module's mode. In evaluation most graphs do not go back, and those that do count from then on.
        """
        if not torch.is_grad_enabled():
            if self._follower.kind == _TRAINING and not self._in_backward:
                self._open_uses.open_unrecorded(Use(units, is_cast=self._is_cast), reader)
            return None
        use = self._open_uses.take_unrecorded(reader) if self._in_backward else None
        if use is None:
            use = Use(units, is_copy=self._in_backward, is_cast=self._is_cast)
        if is_training and not use.is_copy:
            self._open_uses.open(use)
        return use

    def keep_open(self, use: Use) -> None:
        """Keep a use open until the pass ends: no input gets a gradient that would say when its backward has passed."""
        if not use.is_copy:
            self._open_uses.open(use, until_end=True)

    def after_forward(self, *, keeps: Sequence[FlatUnit] = ()) -> bool:
        """Release what is not needed again soon: the forward of the innermost running module has ended.

        keeps: units whose memory its caller reads from now on. Returns whether it was the outermost one; then `keeps`
        are unsharded until `release` is called.
        """
        units = self._running.pop() if self._running else []
        for unit in units:
            self._count(unit, -1)
        is_outermost = not self._running
        for unit in keeps:
            if not is_outermost and self._uses[unit.index] == 0:
                self._running[-1].append(unit)
                self._count(unit, 1)
                self._read_from_outside(unit)
        for unit in units:
            if not (is_outermost and unit in keeps):
                self._release_unless_needed(unit)
        if is_outermost and not keeps:
            self._end_evaluation()
        return is_outermost

    def release_idle(self) -> None:
        """Release what was kept for a later use, or fetched ahead of one. Every rank must call it."""
        for index in sorted(index for index in self._live if not self._uses[index]):
            self._release(self._units[index])
        self._ahead = 0
        self._ahead_numel.clear()

    def release(self, units: Sequence[FlatUnit]) -> None:
        """Release units that the outermost forward has kept."""
        for unit in units:
            self._release_unless_needed(unit)
        self._end_evaluation()

    def _end_evaluation(self) -> None:
        if not torch.is_grad_enabled() and not self._in_backward:
            self._end_pass()  # no backward will follow

    def abort_forward(self) -> None:
        """Leave a forward that an exception has ended. Nothing is waited for: the peers may be gone, and the error must
        be seen."""
        for unit in self._running.pop() if self._running else []:
            self._count(unit, -1)
        if not self._in_backward:  # within backward it is checkpointing that stops a recomputation early
            self._is_broken = True

    def on_access(self, unit: FlatUnit) -> None:
        """See to it that a parameter is there that was read just now, perhaps by the forward of another module."""
        if not unit.is_sharded:
            unit.params.wait()
            if not self._running and not self._in_backward:
                unit.params.note_access(is_in_thread=self.is_in_thread)
            return
        if self._running or self._in_backward:
            self._check_thread()
        if self._running:
            if self._uses[unit.index] == 0:
                self._running[-1].append(unit)
                self._count(unit, 1)
                self._read_from_outside(unit)
            elif unit.params.state is ParameterState.SHARDED:
                self._use([unit])  # a block of `GatheredParameters` within the forward has released it
        elif self._in_backward and not self._running:
            self._read_from_outside(unit)
        else:  # no pass runs: the user looks at the parameter, perhaps on one rank only
            unit.params.was_read_sharded = True

    def on_listing(self, unit: FlatUnit) -> None:
        """See to it that a parameter is there that is being listed with others: a whole one.

        Shards are not gathered: that is collective, and this rank may be the only one that lists.
        """
        if not unit.is_sharded:
            self.on_access(unit)
        elif self._running or self._in_backward:
            self._check_thread()
        else:
            unit.params.was_read_sharded = True

    @property
    def is_in_thread(self) -> bool:
        """Whether this thread is the one that ran the model last."""
        return self._thread is threading.current_thread()

    def _check_thread(self) -> None:
        """Raise EngineError where this thread is neither the one that runs the model nor one of autograd.

        A read that gathers would come between the collectives of that one, in another place on every rank; what is
        unsharded is released while it is read.
        """
        trains = self._thread
        if trains is threading.current_thread() or not trains.is_alive():
            return
        if not is_in_backward():
            raise EngineError(
                f"the thread {threading.current_thread().name} reads or writes what the engine keeps, and the thread"
                f" {trains.name} trains",
                hint=f"call it in {trains.name}; below stage 3 another thread may read parameters and state_dict() of"
                " the model",
            )

    def _read_from_outside(self, unit: FlatUnit) -> None:
        if torch.is_grad_enabled():
            use = Use([unit], is_cast=self._is_cast)
            self._open_uses.open(use, until_end=True)
            self._open_uses.begin_backward(use)
        self._use([unit])

    # ---- backward ----

    def begin_backward(self) -> None:
        """Prepare for the backward pass of what has been run forward."""
        self._thread = threading.current_thread()
        self._in_backward = True
        self._forget_running()

    def before_backward(self, units: Sequence[FlatUnit], use: Use | None) -> None:
        """Unshard `units`: the backward of their module is about to run. use: that of the module's forward."""
        if use is not None:
            self._open_uses.begin_backward(use)
            self._is_cast = use.is_cast
        self._use(units, is_training=True)  # also where the loss of another engine goes back through this one's graph

    def after_backward(self, use: Use) -> list[FlatUnit]:
        """Release the units that no backward reads now; return those that none to come reads either."""
        idle, finished = self._open_uses.close(use)
        for unit in idle:
            if self._uses[unit.index] == 0:
                self._release(unit)
        return finished

    def end_backward(self) -> None:
        """End the pass: everything goes back to shards."""
        self._in_backward = False
        self._end_pass()

    def abort_backward(self) -> None:
        """Leave a backward pass that an exception ended. Nothing is waited for or released: see `reset`."""
        self._in_backward = False
        self._forget_running()

    def reset(self) -> None:
        """Shard everything and forget the pass under way, after an exception in it."""
        self._is_broken = False
        self._forget_running()
        self.end_backward()
        self._open_uses.forget()

    def after_step(self) -> None:
        """Forget what the optimizer step has ended: forwards that have not gone back, and units that it has released.

        A pass under way continues: what follows is recorded with it. Call it alike on every rank.
        """
        self._open_uses.forget()
        for index in [index for index in self._live if not self._units[index].params.is_scheduled]:
            self._live.discard(index)
            self._live_numel -= self._units[index].numel
        self._ahead = 0
        self._ahead_numel.clear()

    def _forget_running(self) -> None:
        self._running.clear()
        for unit in self._units:
            self._count(unit, -self._uses[unit.index])

    def _count(self, unit: FlatUnit, change: int) -> None:
        """Count how many modules whose forward runs read a unit."""
        self._uses[unit.index] = max(0, self._uses[unit.index] + change)
        unit.is_read = self._uses[unit.index] > 0

    # ---- fetching ----

    def _use(self, units: Sequence[FlatUnit], *, is_training: bool = False) -> None:
        if self._has_sharded:
            if not self._follower.is_open:
                is_training = is_training or torch.is_grad_enabled() or self._in_backward
                self._follower.begin(_TRAINING if is_training else _EVALUATION)
                if self._order is not None:
                    self._order.is_evaluation = not is_training
                self._ahead = 0
            for unit in units:
                if unit.is_sharded:
                    self._record(unit)
                    self._fetch(unit)
            self._fetch_ahead()
        for unit in units:
            self._wait(unit)

    def _wait(self, unit: FlatUnit) -> None:
        try:
            unit.params.wait()
        except RuntimeError as error:
            # Behind the host it may be any error of the device, such as an assertion of an earlier kernel.
            is_behind = unit.group.runtime.is_async_device
            if is_behind or self._in_backward or self._follower.kind != _EVALUATION or not unit.is_sharded:
                raise
            raise EngineError(
                f"the gather of {unit.label} for a forward without gradients has failed: another rank has ended",
                hint=EVALUATION_HINT,
            ) from error

    def _record(self, unit: FlatUnit) -> None:
        self._follower.record(unit.index)
        self._ahead_numel.pop(unit.index, None)
        if self._ahead:
            self._ahead -= 1

    def _fetch(self, unit: FlatUnit) -> None:
        params = unit.params
        if not params.is_gathered_in(for_autocast=self._is_cast) and self._uses[unit.index] <= 1:
            params.is_scheduled = False
            params.release_if_idle()
        if params.state is ParameterState.SHARDED:
            if self._order is not None:
                self._order.note(Collective.GATHER, unit.index)
            params.start_gather(for_autocast=self._is_cast)
        params.is_scheduled = True
        if unit.index not in self._live:
            self._live.add(unit.index)
            self._live_numel += unit.numel
            self.peak_live_numel = max(self.peak_live_numel, self._live_numel)

    def _fetch_ahead(self) -> None:
        while sum(self._ahead_numel.values()) < self._policy.prefetch_numel:
            index = self._follower.upcoming(self._ahead)
            if index is None:
                return
            unit = self._units[index]
            if unit.params.state is ParameterState.SHARDED:
                if self._live_numel + unit.numel > self._policy.max_live_numel:
                    return
                self._fetch(unit)
                self._ahead_numel[index] = unit.numel
            self._ahead += 1
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Start reading, of the shards that are on disk, those of the units that are fetched after these."""
        for distance in range(self._policy.num_read_ahead):
            index = self._follower.upcoming(self._ahead + distance)
            if index is not None:
                self._units[index].params.start_reading()
                self._reading.add(index)

    # ---- releasing ----

    def _release_unless_needed(self, unit: FlatUnit) -> None:
        index = unit.index
        if self._uses[index] or self._in_backward:
            return  # in backward a recomputed forward is followed by the backward that reads it
        distance = self._follower.reuse_distance(index)
        is_near = distance is not None and distance < self._policy.max_reuse_distance
        if not (is_near and self._live_numel <= self._policy.max_live_numel):
            self._release(unit)

    def _release(self, unit: FlatUnit) -> None:
        if unit.index in self._live:
            self._live.discard(unit.index)
            self._live_numel -= unit.numel
            unit.params.is_scheduled = False
            unit.params.release_if_idle()

    def _end_pass(self) -> None:
        for index in sorted(self._live):
            self._release(self._units[index])
        for index in self._reading:
            self._units[index].params.stop_reading()
        self._reading.clear()
        self._open_uses.end_pass()
        self._follower.end()
        if self._order is not None:
            self._order.is_evaluation = False
        self._ahead = 0
        self._ahead_numel.clear()
