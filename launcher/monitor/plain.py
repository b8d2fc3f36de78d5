"""What a rank's journal has of a script without the engine: steps, waits for data and collectives, backward passes,
saves.

Installed in a rank of `launch` once torch is imported. A few functions of torch then enter a phase of the step's clock;
their results are their own. A step is a call of `step()` of the optimizer that was the first to take one. In a process
with an engine the engine counts the steps.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from launcher.base.progress import update_progress
from launcher.comm.torch_internals import loader_iterator
from launcher.journal.rank import RankJournal, own_journal
from launcher.journal.records import BACKWARD, COMMUNICATION, DATA, SAVE, UPDATE
from launcher.journal.steps import StepClock, step_clock
from launcher.monitor.meters import memory_use
from launcher.monitor.trace import StepTracer, make_tracer

_LEAST_SAVE_S = 0.001  # of `torch.save`: others are no checkpoints


def install() -> None:
    """Follow this process's steps, where it has a journal. Once."""
    journal = own_journal()
    if journal is None:
        return
    journal.add("torch", release=torch.__version__)
    clock = step_clock()
    iterator = loader_iterator()
    iterator.__next__ = _within(clock, DATA, iterator.__next__)
    backward: Any = torch.Tensor.backward
    if torch.distributed.is_available():  # what a collective that is not asynchronous waits in; DDP's own are in C++
        work: Any = torch.distributed.Work
        work.wait = _within(clock, COMMUNICATION, work.wait)
    torch.save = torch.serialization.save = _saving(journal, clock, torch.save)
    steps = _PlainSteps(journal, clock, make_tracer(journal, clock))
    inside = _within(clock, BACKWARD, backward)

    @functools.wraps(backward)
    def watched(loss: Any, *arguments: Any, **options: Any) -> Any:
        steps.note_loss(loss)
        return inside(loss, *arguments, **options)

    torch.Tensor.backward = watched  # type: ignore[method-assign, assignment]
    register_optimizer_step_pre_hook(steps.begin_update)
    register_optimizer_step_post_hook(steps.end_update)


def _within(clock: StepClock, phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    inside = clock.inside(phase)

    @functools.wraps(call)
    def within(*arguments: Any, **options: Any) -> Any:
        if not clock.is_in_thread():
            return call(*arguments, **options)
        with inside:
            return call(*arguments, **options)

    return within


def _saving(journal: RankJournal, clock: StepClock, call: Callable[..., Any]) -> Callable[..., Any]:
    within = _within(clock, SAVE, call)

    @functools.wraps(call)
    def saving(obj: Any, f: Any, *arguments: Any, **options: Any) -> Any:
        if clock.is_in(SAVE):  # part of the engine's
            return call(obj, f, *arguments, **options)
        start_s = time.perf_counter()
        try:
            return within(obj, f, *arguments, **options)
        finally:
            duration_s = time.perf_counter() - start_s
            if duration_s > _LEAST_SAVE_S and clock.is_in_thread():
                journal.add("save", path=str(f)[:1000], duration_s=round(duration_s, 6))

    return saving


class _PlainSteps:
    """Counts the steps of the first optimizer that takes one, and writes their records."""

    def __init__(self, journal: RankJournal, clock: StepClock, tracer: StepTracer | None) -> None:
        self._journal, self._clock, self._tracer = journal, clock, tracer
        self._optimizer: Any = None  # whose calls are the steps
        self._num_done = self._num_written = 0
        self._duration_s = self._slowest_s = 0.0
        self._phases: dict[str, float] = {}
        self._update, self._is_updating = clock.inside(UPDATE), False
        journal.call_at_end(self._write_rest)
        self._has_nan = False  # a loss was; infinite ones are what a gradient scaler expects
        self._last_finite = 0  # the last step whose loss was looked at and was finite
        # Of a loss on a GPU, in pinned memory, and its step: read once it has long arrived.
        self._copy: tuple[torch.Tensor, int] | None = None

    def note_loss(self, loss: Any) -> None:
        """A backward pass begins at `loss`, whatever that is. Never waits for a device."""
        if self._has_nan or self._clock.has_engine or not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return
        if loss.device.type == "cpu":
            self._look(loss.detach(), self._num_done + 1)
        elif self._copy is None:
            self._copy = torch.zeros((), pin_memory=True), self._num_done + 1
            self._copy[0].copy_(loss.detach(), non_blocking=True)

    def _look(self, loss: torch.Tensor, step: int) -> None:
        if not (loss.is_floating_point() and math.isnan(loss.item())):
            self._last_finite = step
            return
        self._has_nan = True
        self._journal.add("nonfinite", step=step, what="loss", module=None, last_finite=self._last_finite)

    def begin_update(self, optimizer: Any, _arguments: Any, _options: Any) -> None:
        """An optimizer is about to take a step."""
        if self._clock.is_in_thread() and not self._clock.has_engine:
            self._end_phase()  # of a step that has raised: no hook is called then
            self._update.__enter__()
            self._is_updating = True

    def _end_phase(self) -> None:
        if self._is_updating:
            self._is_updating = False
            self._update.__exit__(None, None, None)

    def end_update(self, optimizer: Any, _arguments: Any, _options: Any) -> None:
        """An optimizer has taken a step."""
        if not self._clock.is_in_thread() or self._clock.has_engine:
            return
        self._end_phase()
        if self._optimizer is None:
            self._optimizer = optimizer
            self._clock.take()
        elif self._optimizer is not optimizer:
            return
        else:
            self._count(*self._clock.take())
        self._num_done += 1
        update_progress(step=self._num_done)
        if self._tracer is not None:
            self._tracer.end_step(self._num_done)

    def _count(self, duration_s: float, phases: dict[str, float]) -> None:
        self._duration_s += duration_s
        self._slowest_s = max(self._slowest_s, duration_s)
        for name, time_s in phases.items():
            self._phases[name] = self._phases.get(name, 0.0) + time_s
        if self._duration_s >= self._journal.record_interval_s:
            self._write(self._num_done + 1)

    def _write_rest(self) -> None:
        if self._duration_s:
            self._write(self._num_done)

    def _write(self, step: int) -> None:
        """Write the record of the steps up to `step`: the first one, which begins the clock, is in none."""
        if self._copy is not None:
            copy, self._copy = self._copy, None
            self._look(*copy)
        group = self._optimizer.param_groups[0]
        param = next(iter(group["params"]), None)
        use = memory_use(torch.device("cpu") if param is None else param.device)
        lr = group.get("lr")
        self._journal.add(
            "step",
            step=step,
            num_steps=step - 1 - self._num_written,
            duration_s=round(self._duration_s, 6),
            slowest_s=round(self._slowest_s, 6),
            phases={name: round(time_s, 6) for name, time_s in self._phases.items()},
            lr=None if lr is None else float(lr),
            memory_bytes=use.used_bytes,
            peak_bytes=use.peak_bytes,
        )
        self._num_written = step - 1
        self._duration_s, self._slowest_s, self._phases = 0.0, 0.0, {}
