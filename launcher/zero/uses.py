"""Which backward passes still read a unit. Known from the modules' paths alone, so it is alike on every rank.

[Note: one order on every rank] Gathers and reductions are collectives: all ranks must issue them in one order. Which
parameters get a gradient, and when, may differ between ranks (each rank's data chooses its experts). Which modules run,
and in which order, may not: that is the contract of stage 3. So everything that is issued within backward follows the
modules: a unit is gathered when the gradient of its module's output arrives, and it is reduced and released when the
gradients of its module's inputs are complete. A unit that several modules read waits for the last of them.

[Note: no object's lifetime] A use whose backward never comes keeps its unit from being reduced before the pass ends.
It counts although its graph may be gone: when Python frees a graph depends on its garbage collector, and on what this
rank keeps. A use that has not gone back is forgotten at the step. If it goes back all the same, it counts again, and
gradients that come after the reduction are added before the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.zero.unit import FlatUnit


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
