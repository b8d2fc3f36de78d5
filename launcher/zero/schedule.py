"""When units are made whole and when they are released: around each use, ahead of it, and not longer than needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from launcher.zero.stages import ParameterPolicy, ParameterState
from launcher.zero.trace import TraceFollower
from launcher.zero.unit import FlatUnit

_TRAINING, _EVALUATION = "training", "evaluation"


class ParameterSchedule:
    """Makes units whole before their use and shards them after it.

    A pass is a forward and its backward, or a forward without one. All ranks must use the same units in the same
    order: gathering is collective. Units that are never sharded are only waited for.
    """

    def __init__(self, units: list[FlatUnit], policy: ParameterPolicy) -> None:
        self._units = units
        self._policy = policy
        self._follower = TraceFollower([unit.numel for unit in units])
        self._has_sharded = any(unit.is_sharded for unit in units)
        self._depth = 0  # modules with units whose forward is running
        self._uses = [0] * len(units)  # of those, how many use each unit
        self._in_backward = False
        # Graphs whose backward reads each unit: reentrant checkpointing runs a graph of its own within the model's.
        self._graphs: list[set[int]] = [set() for _ in units]
        self._held: list[FlatUnit] = []  # used outside of their modules: whole until the outermost forward ends
        self._live: set[int] = set()  # units made whole from here; what the user gathers is the user's to release
        self._live_numel = 0
        self._reading: set[int] = set()  # units whose shards were read ahead of being fetched
        self._ahead = 0  # how many of the upcoming uses have been looked at
        self._ahead_numel = 0  # elements fetched ahead and not used yet
        self.peak_live_numel = 0

    @property
    def live_numel(self) -> int:
        """Elements of sharded units that are whole or on their way now."""
        return self._live_numel

    @property
    def num_path_changes(self) -> int:
        """Passes so far that did not use the units in the recorded order."""
        return self._follower.num_misses

    # ---- forward ----

    def before_forward(self, units: Sequence[FlatUnit]) -> None:
        """Make `units` whole: the forward of their module is about to run."""
        self._depth += 1
        for unit in units:
            self._uses[unit.index] += 1
        self._use(units)

    def after_forward(self, units: Sequence[FlatUnit]) -> Sequence[FlatUnit]:
        """Release what is not needed again soon; return the units the module's backward will read."""
        self._depth = max(0, self._depth - 1)
        for unit in units:
            self._uses[unit.index] = max(0, self._uses[unit.index] - 1)
        read = list(units)
        if self._depth == 0:
            held, self._held = self._held, []
            read += [unit for unit in held if unit not in read]
        for unit in read:
            self._release_unless_needed(unit)
        if self._depth == 0 and not torch.is_grad_enabled() and not self._in_backward:
            self._end_pass()  # no backward will follow
        return read

    def on_access(self, unit: FlatUnit) -> bool:
        """See to it that a parameter a running forward has asked for is there; return whether it had to be fetched."""
        if unit.params.state is ParameterState.WHOLE:
            return False
        if unit.is_sharded and self._depth == 0 and not self._in_backward:
            return False  # outside of a pass: the user looks at the parameter, perhaps on one rank only
        self._use([unit])
        if not unit.is_sharded:
            return False
        self._held.append(unit)
        return True

    # ---- backward ----

    def begin_backward(self) -> None:
        """Prepare for the backward pass of what has been run forward."""
        self._in_backward = True
        self._depth = 0
        self._uses = [0] * len(self._units)

    def before_backward(self, units: Sequence[FlatUnit]) -> None:
        """Make `units` whole: the backward of their module is about to run."""
        for unit in units:
            self._graphs[unit.index].add(torch._C._current_graph_task_id())
        self._use(units)

    def after_gradients(self, unit: FlatUnit) -> None:
        """Release a unit that no more backward reads: the graph that runs is done with it."""
        self._graphs[unit.index].discard(torch._C._current_graph_task_id())
        if self._uses[unit.index] == 0 and not self._graphs[unit.index]:
            self._release(unit)

    def end_backward(self) -> None:
        """End the pass: everything goes back to shards."""
        self._in_backward = False
        self._end_pass()

    def reset(self) -> None:
        """Shard everything and forget the pass under way, after an exception in it."""
        self._depth = 0
        self._uses = [0] * len(self._units)
        self._held.clear()
        self.end_backward()

    # ---- fetching ----

    def _use(self, units: Sequence[FlatUnit]) -> None:
        if self._has_sharded:
            if not self._follower.is_open:
                self._follower.begin(_TRAINING if torch.is_grad_enabled() or self._in_backward else _EVALUATION)
                self._ahead = 0
            for unit in units:
                if unit.is_sharded:
                    self._record(unit)
                    self._fetch(unit)
            self._fetch_ahead()
        for unit in units:
            unit.params.wait()

    def _record(self, unit: FlatUnit) -> None:
        self._follower.record(unit.index)
        if self._ahead:
            self._ahead -= 1
            if unit.params.state is ParameterState.GATHERING:
                self._ahead_numel -= unit.numel

    def _fetch(self, unit: FlatUnit) -> None:
        if unit.params.state is not ParameterState.SHARDED:
            return
        unit.params.start_gather()
        self._live.add(unit.index)
        self._live_numel += unit.numel
        self.peak_live_numel = max(self.peak_live_numel, self._live_numel)

    def _fetch_ahead(self) -> None:
        while self._ahead_numel < self._policy.prefetch_numel:
            index = self._follower.upcoming(self._ahead)
            if index is None:
                return
            unit = self._units[index]
            if unit.params.state is ParameterState.SHARDED:
                if self._live_numel + unit.numel > self._policy.max_live_numel:
                    return
                self._fetch(unit)
                self._ahead_numel += unit.numel
            self._ahead += 1
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Start reading, of the shards that rest on disk, those of the units that are fetched after these."""
        for distance in range(self._policy.num_read_ahead):
            index = self._follower.upcoming(self._ahead + distance)
            if index is not None:
                self._units[index].params.start_reading()
                self._reading.add(index)

    # ---- releasing ----

    def _release_unless_needed(self, unit: FlatUnit) -> None:
        index = unit.index
        if self._uses[index] or self._in_backward or unit in self._held:
            return  # in backward a recomputed forward is followed by the backward that reads it
        distance = self._follower.reuse_distance(index)
        is_near = distance is not None and distance <= self._policy.max_reuse_distance
        if not (is_near and self._live_numel <= self._policy.max_live_numel):
            self._release(unit)

    def _release(self, unit: FlatUnit) -> None:
        if unit.index in self._live:
            self._live.discard(unit.index)
            self._live_numel -= unit.numel
            unit.params.release()

    def _end_pass(self) -> None:
        for index in sorted(self._live):
            self._release(self._units[index])
        for index in self._reading:
            self._units[index].params.stop_reading()
        self._reading.clear()
        for graphs in self._graphs:
            graphs.clear()
        self._follower.end()
        self._ahead = self._ahead_numel = 0
