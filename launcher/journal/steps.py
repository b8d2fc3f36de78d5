"""Where the time of a rank's steps goes: what it does now, by phases that exclude each other, and a record of steps.

One clock a process: the engine enters its phases, and so do the few functions of torch that are watched in scripts
without the engine (`launcher.monitor.plain`). Entering and leaving a phase costs less than a microsecond together.
"""

from __future__ import annotations

import gc
import threading
import time

from launcher.journal.records import GC, PHASES, SCRIPT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_NAMES = {name: index for index, name in enumerate(PHASES)}
_SCRIPT, _GC = _NAMES[SCRIPT], _NAMES[GC]


class StepClock:
    """Adds up the seconds of each phase. What is within another phase counts for the inner one alone."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._times = [0.0] * len(PHASES)
        self._current = _SCRIPT
        self._last_s = self._begun_s = now()
        self._thread_id = threading.get_ident()  # in which the phases follow each other
        self._gc_begun_s: float | None = None
        self.gc_longest_s = 0.0  # since whoever reads it has set it back
        self.has_engine = False  # which counts the steps
        self.on_switch: Callable[[int], None] | None = None  # gets the phase that begins: a GPU's clock records events
        self.marks: list[tuple[int, int]] | None = None  # while steps are traced: ns since the epoch, phase that begins
        self._inside = {name: _Inside(self, index) for name, index in _NAMES.items()}
        gc.callbacks.append(self._on_gc)

    def inside(self, phase: str) -> _Inside:
        """Return the context within which this rank is in a phase. One object a phase: it may lie within itself."""
        return self._inside[phase]

    def switch(self, phase: int) -> int:
        """Begin a phase; return the one before it."""
        now_s, before = self._now(), self._current
        self._times[before] += now_s - self._last_s
        self._last_s, self._current = now_s, phase
        if self.on_switch is not None:
            self.on_switch(phase)
        if self.marks is not None:
            self.mark()
        return before

    @property
    def phase(self) -> str:
        """What the rank is in now."""
        return PHASES[self._current]

    def mark(self) -> None:
        """Note for a trace that this is the phase from now on."""
        if self.marks is not None:
            self.marks.append((time.time_ns(), self._current))

    def is_in(self, phase: str) -> bool:
        """Whether this is the phase now."""
        return self._current == _NAMES[phase]

    def is_in_thread(self) -> bool:
        """Whether the calling thread is the one whose phases are counted: a save may communicate in another one."""
        return threading.get_ident() == self._thread_id

    def enter_thread(self) -> None:
        """Count the phases of the calling thread from now on: on a GPU autograd runs backward in its own."""
        self._thread_id = threading.get_ident()

    def take(self) -> tuple[float, dict[str, float]]:
        """Return the seconds since the last call, and of each phase in them."""
        self.switch(self._current)
        duration_s, self._begun_s = self._last_s - self._begun_s, self._last_s
        times, self._times = self._times, [0.0] * len(PHASES)
        return duration_s, {name: round(time_s, 6) for name, time_s in zip(PHASES, times, strict=True) if time_s}

    def _on_gc(self, event: str, _info: dict[str, int]) -> None:
        # Whichever thread collects: it holds the interpreter's lock, so every thread of Python waits.
        if event == "start":
            self._gc_begun_s = self._now()
        elif self._gc_begun_s is not None:
            pause_s, self._gc_begun_s = self._now() - self._gc_begun_s, None
            self._times[_GC] += pause_s
            self._times[self._current] -= pause_s
            self.gc_longest_s = max(self.gc_longest_s, pause_s)


class _Inside:
    """The context of one phase of a clock."""

    __slots__ = ("_before", "_clock", "_index")

    def __init__(self, clock: StepClock, index: int) -> None:
        self._clock, self._index = clock, index
        self._before: list[int] = []

    def __enter__(self) -> None:
        self._before.append(self._clock.switch(self._index))

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._clock.switch(self._before.pop())


_clock: StepClock | None = None


def step_clock() -> StepClock:
    """Return the clock of this process."""
    global _clock
    if _clock is None:
        _clock = StepClock()
    return _clock
