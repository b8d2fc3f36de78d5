"""In which order units are used, learnt from the pass before: what to fetch ahead and what to keep. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


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
        """Return the unit that will be used after `offset` others; None: nobody knows, or the pass ends before."""
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
