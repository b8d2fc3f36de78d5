"""The records of steps in a rank's journal: where the time went, loss, norm, memory. Never waits for a device.

On a CPU the phases are wall time of the host. On a GPU each change of phase records an event, and a step is written
once its last event has passed, which later steps ask: the times are the device's own, waiting for collectives included.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from launcher.comm.device import device_module
from launcher.comm.observe import sent_bytes
from launcher.journal.rank import RankJournal
from launcher.journal.records import PHASES
from launcher.journal.steps import StepClock
from launcher.monitor.meters import memory_use
from launcher.monitor.nonfinite import NonfiniteWatch

_MAX_PENDING = 64  # steps whose events have not passed; beyond them a step is written without the device's times


@dataclass(frozen=True)
class StepEnd:
    """What is known at the end of an optimizer step."""

    step: int
    losses: Sequence[Tensor]  # of the micro-batches of this rank: detached scalars
    lr: float
    loss_scale: float | None  # None: the precision needs none
    num_samples: int  # of this rank
    outcome: Callable[[], tuple[float | None, bool]]  # norm, and whether nothing was updated; asked once it is there

    def norm_to_check(self, norm: float | None, *, is_skipped: bool) -> float | None:
        """Return a norm that should be finite: with a loss scale that of a skipped step need not be."""
        return None if is_skipped and self.loss_scale is not None else norm


class StepRecorder:
    """Writes a record of each optimizer step, or of several short ones together."""

    def __init__(
        self, journal: RankJournal, clock: StepClock, device: torch.device, model: nn.Module | None = None
    ) -> None:
        """model: whose outputs are looked at after a loss that is not finite."""
        self.journal, self._clock, self._device = journal, clock, device
        self._nonfinite = NonfiniteWatch(journal, model)
        self._marks = None if device.type == "cpu" else _DeviceMarks(device)
        if self._marks is not None:
            clock.on_switch = self._marks.add
        self._pending: deque[_Pending] = deque()
        self._num_steps = self._num_samples = self._num_skipped = self._num_tokens = 0
        self._duration_s = self._slowest_s = 0.0
        self._phases: dict[str, float] = {}
        self._sent_bytes = sent_bytes()
        self._unwritten: list[StepEnd] = []  # of the steps that are not written yet; on a CPU the last one
        journal.call_at_end(self._write_rest)
        clock.take()  # what came before is no step

    def note_inputs(self, inputs: Any, kwargs: dict[str, Any]) -> None:
        """Count the tokens of a micro-batch: the elements of the first tensor of whole numbers with two dimensions."""
        for value in (*inputs, *kwargs.values()):
            if isinstance(value, Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32):
                self._num_tokens += value.numel()
                return

    def end(self, facts: StepEnd) -> None:
        """Count a step that has ended; write it where it is due."""
        duration_s, phases = self._clock.take()
        self._num_steps += 1
        self._num_samples += facts.num_samples
        self._duration_s += duration_s
        self._slowest_s = max(self._slowest_s, duration_s)
        for name, time_s in phases.items():
            self._phases[name] = self._phases.get(name, 0.0) + time_s
        if self._marks is None:
            norm, is_skipped = facts.outcome()
            self._num_skipped += is_skipped
            loss = sum(each.item() for each in facts.losses) if facts.losses else None
            # Each step, also one that shares a record: the rank on which it begins is known by its step.
            self._nonfinite.look(facts.step, loss, facts.norm_to_check(norm, is_skipped=is_skipped))
        self._write_arrived()
        self._unwritten = [facts] if self._marks is None else [*self._unwritten, facts]
        if self._duration_s >= self.journal.record_interval_s:
            self._write(facts)

    def _write_rest(self) -> None:
        if self._unwritten:
            self._write(self._unwritten[-1])
        self._write_arrived()

    def _write(self, facts: StepEnd) -> None:
        use, sent = memory_use(self._device), sent_bytes()
        unwritten, self._unwritten = self._unwritten, []
        record = {
            "step": facts.step,
            "num_steps": self._num_steps,
            "duration_s": round(self._duration_s, 6),
            "slowest_s": round(self._slowest_s, 6),
            "phases": {name: round(time_s, 6) for name, time_s in self._phases.items()},
            "lr": facts.lr if math.isfinite(facts.lr) else None,
            "loss_scale": facts.loss_scale,
            "samples": self._num_samples,
            "tokens": self._num_tokens,
            "sent_bytes": sent - self._sent_bytes,
            "memory_bytes": use.used_bytes,
            "peak_bytes": use.peak_bytes,
        }
        self._sent_bytes, self._phases = sent, {}
        self._duration_s = self._slowest_s = 0.0
        loss = torch.stack([loss.float() for loss in facts.losses]).mean() if facts.losses else None
        num_skipped, self._num_skipped = self._num_skipped, 0
        self._num_steps = self._num_samples = self._num_tokens = 0
        if self._marks is None:
            self._add(record, loss, facts, num_skipped)
            return
        host = None
        if loss is not None:
            host = torch.empty((), pin_memory=True)
            host.copy_(loss, non_blocking=True)
        self._pending.append(_Pending(record, host, unwritten, self._marks.take()))

    def _add(self, record: dict[str, Any], loss: Tensor | None, facts: StepEnd, num_skipped: int) -> None:
        norm, is_skipped = facts.outcome()
        value = None if loss is None else loss.item()
        if self._marks is not None:
            self._nonfinite.look(facts.step, value, facts.norm_to_check(norm, is_skipped=is_skipped))
        self.journal.add("step", **record, loss=value, norm=norm, skipped=num_skipped)

    def _write_arrived(self) -> None:
        """Write what the device has done by now."""
        while self._pending:
            first = self._pending[0]
            if not first.has_arrived and len(self._pending) <= _MAX_PENDING:
                return
            self._pending.popleft()
            if first.has_arrived:
                assert self._marks is not None
                first.record["phases"] = self._marks.times(first.marks)
                first.record["duration_s"] = round(sum(first.record["phases"].values()), 6)
                num_skipped = sum(facts.outcome()[1] for facts in first.steps)
                self._add(first.record, first.loss, first.steps[-1], num_skipped)
            else:
                self.journal.add("step", **first.record, loss=None, norm=None, skipped=0)


Marks = list[tuple[int, Any]]  # phase that begins, event


@dataclass(frozen=True)
class _Pending:
    """A record that waits for the device."""

    record: dict[str, Any]
    loss: Tensor | None  # in pinned memory
    steps: list[StepEnd]
    marks: Marks

    @property
    def has_arrived(self) -> bool:
        return bool(self.marks[-1][1].query())


class _DeviceMarks:
    """Events of a device at each change of phase, from a pool: to make one costs more than to record it."""

    def __init__(self, device: torch.device) -> None:
        self._module, self._device = device_module(device), device
        self._pool: list[Any] = []
        self._marks: Marks = []

    def add(self, phase: int) -> None:
        """Record that a phase begins, as the device gets there."""
        event = self._pool.pop() if self._pool else self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        self._marks.append((phase, event))

    def take(self) -> Marks:
        """Return the marks since the last call; the last one is the first of the next."""
        if not self._marks:
            self.add(len(PHASES) - 1)
        marks, self._marks = self._marks, self._marks[-1:]
        return marks

    def times(self, marks: Marks) -> dict[str, float]:
        """Return the seconds of each phase between marks that have passed, and take their events back."""
        times: dict[str, float] = {}
        for (phase, event), (_, later) in itertools.pairwise(marks):
            times[PHASES[phase]] = times.get(PHASES[phase], 0.0) + event.elapsed_time(later) / 1e3
        self._pool += [event for _, event in marks[:-1]]
        return {name: round(time_s, 6) for name, time_s in times.items() if time_s}
