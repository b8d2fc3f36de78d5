"""Everything that looks at a training and takes no part in it: curves, times, memory, FLOPs, the log of collectives."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launcher.activation.blocks import recomputes as recomputes_itself
from launcher.base.log import get_logger
from launcher.base.progress import update_progress
from launcher.comm import observe
from launcher.comm.hosts import AsyncHostCopy
from launcher.comm.observe import LogRules, start_log, stop_log
from launcher.config.schema import Config
from launcher.engine.parts import EngineParts
from launcher.journal.rank import own_journal
from launcher.journal.records import BACKWARD, COMMUNICATION, FORWARD, SAVE, UPDATE
from launcher.journal.steps import StepClock, step_clock
from launcher.monitor.curves import Curves, open_curves
from launcher.monitor.flops import FlopCounter, ModelFlops, ProfileForm, ProfileTimes, peak_flops, profile_text
from launcher.monitor.meters import GIB, LossReporter, MemoryUse, PhaseTimer, ThroughputTimer, memory_use
from launcher.monitor.steps import StepEnd, StepRecorder
from launcher.monitor.trace import own_tracer
from launcher.sharding.layout import unsharded_numel
from launcher.zero.states import TORCH_DTYPES

DEFAULT_WINDOW = 10  # steps between lines when `steps_per_print` is off
_NOTHING = contextlib.nullcontext()
_CLOCK_PHASES = {"forward": FORWARD, "backward": BACKWARD, "step": UPDATE}


@dataclass(frozen=True)
class StepFacts:
    """What is known after an optimizer step."""

    step: int
    num_samples: int
    losses: list[Tensor]  # of the micro-batches of this rank
    lr: float
    loss_scale: float | None  # None: the precision needs none
    outcome: Callable[[], tuple[float | None, bool]]  # norm, and whether nothing was updated; waits for the device


class Watch:
    """Follows an engine through the phases forward, backward and step. Every rank must make one, rank 0 reports."""

    def __init__(self, model: nn.Module, parts: EngineParts) -> None:
        """Raises: EngineError when the library of an enabled monitor is missing."""
        settings, group = parts.settings, parts.mesh.world
        self._parts = parts
        self._is_rank0 = group.rank == 0
        self._device = group.device
        self._loss_reporter = LossReporter(is_wanted=self._is_rank0)
        self.count_samples(parts.batch.train_batch_size)
        self._num_path_changes = self._num_samples = 0
        self._window = int(settings.steps_per_print or DEFAULT_WINDOW)
        self._num_done = 0  # optimizer steps
        self.curves = open_curves(settings, group.rank)
        reports = self._is_rank0
        self._timer = PhaseTimer(group.device) if reports and settings.wall_clock_breakdown else None
        self._releases: list[weakref.finalize[..., Watch]] = []  # what ends with this engine, also where it is dropped
        if self._timer is not None:
            span = functools.partial(_span_of_wait, self._timer)
            observe.add_wait_span(span)
            self._releases.append(weakref.finalize(self, observe.remove_wait_span, span))
        self._memory: dict[str, MemoryUse] | None = {} if reports and settings.memory_breakdown else None
        profiles = reports and settings.flops_profiler.enabled
        dtype = TORCH_DTYPES[parts.policy.precision.compute]
        self._profile = _Profile(settings, group.device, model, dtype) if profiles else None
        self.profiled: ProfiledStep | None = None  # on rank 0, once `flops_profiler` has counted
        logger = settings.comms_logger
        if logger.enabled:
            log = start_log(LogRules(logger.verbose, logger.prof_all, logger.debug, logger.prof_ops))
            self._releases.append(weakref.finalize(self, stop_log, log))
        self._is_idle = self._timer is None and self._memory is None and self._profile is None
        self._clock = step_clock()
        journal = own_journal()
        self._tracer = own_tracer()
        self._recorder = None if journal is None else StepRecorder(journal, self._clock, group.device, model)
        if self._recorder is not None:
            self._clock.has_engine = True
            observe.follow_waits(functools.partial(_communication, self._clock))
        counts = self._recorder is not None and self._is_rank0 and parts.sharded.optimizer is not None
        num_micro_batches = parts.batch.accumulation_steps
        recomputes = settings.activation_checkpointing.blocks or recomputes_itself(model)
        self._flops = ModelFlops(num_micro_batches, recomputes=recomputes) if counts else None

    def stop(self) -> None:
        """Follow no more: for this engine, collectives are neither measured nor logged."""
        for release in self._releases:
            release()

    def phase(self, name: str, *, is_called: bool = True) -> contextlib.AbstractContextManager[None]:
        """Return the context of `forward`, `backward` or `step`. is_called: by the engine, and not within autograd."""
        if self._recorder is None:
            return _NOTHING if self._is_idle else self._phase(name)
        self._clock.enter_thread()
        inside: contextlib.AbstractContextManager[None] = self._clock.inside(_CLOCK_PHASES[name])
        if self._flops is not None:
            inside = self._counted(self._flops, name, inside, is_called=is_called)
        return inside if self._is_idle else self._phase(name, inside)

    @contextlib.contextmanager
    def _counted(
        self, flops: ModelFlops, name: str, inside: contextlib.AbstractContextManager[None], *, is_called: bool
    ) -> Iterator[None]:
        with inside, flops.phase(name, is_called=is_called) as record:
            yield
        if record and self._recorder is not None:
            self._recorder.journal.add("flops", **record)
        if flops.is_over:
            self._flops = None

    @contextlib.contextmanager
    def saving(self, path: str) -> Iterator[None]:
        """Record how long the training waits for a save."""
        if self._recorder is None:
            yield
            return
        start_s = time.perf_counter()
        with self._clock.inside(SAVE):
            yield
        duration_s = round(time.perf_counter() - start_s, 6)
        self._recorder.journal.add("save", path=path, duration_s=duration_s)

    @contextlib.contextmanager
    def _phase(self, name: str, inside: contextlib.AbstractContextManager[None] = _NOTHING) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(inside)
            if self._profile is not None:
                stack.enter_context(self._profile.phase(name))
            if self._timer is not None:
                stack.enter_context(self._timer.span(name))
            yield
        if self._memory is not None and (self._num_done + 1) % self._window == 0:
            self._memory[name] = memory_use(self._device)

    def note_inputs(self, inputs: Any, kwargs: dict[str, Any]) -> None:
        """Count what a micro-batch has."""
        if self._recorder is not None:
            self._recorder.note_inputs(inputs, kwargs)

    def trace(self, step: int) -> None:
        """Begin or end a trace here, if one is asked for. While it is recorded, gloo may have no transfer in flight."""
        if self._tracer is not None:
            self._tracer.end_step(step)

    def count_samples(self, train_batch_size: int) -> None:
        """Measure anew how many samples a second are trained on, with this many a step."""
        self.throughput = ThroughputTimer(train_batch_size, self._parts.settings.steps_per_print or 1)

    def continue_from(self, num_samples: int) -> None:
        """Count what is trained on from here: a checkpoint's samples are no part of the next step."""
        self._num_samples = num_samples

    def prints(self, step: int) -> bool:
        """Whether this rank prints a line about this step."""
        every = self._parts.settings.steps_per_print
        return self._is_rank0 and every is not None and every > 0 and step % every == 0

    def after_step(self, facts: StepFacts, norm: Callable[[], float | None]) -> None:
        """Tell the panel the loss; write curves and whatever report is due. norm: waits for that of the gradients."""
        self._warn_of_new_path(facts.step)
        if self._recorder is not None:
            sizes = self._parts.mesh.sizes
            num_samples = facts.num_samples - self._num_samples
            self._num_samples = facts.num_samples
            self._recorder.end(
                StepEnd(facts.step, facts.losses, facts.lr, facts.loss_scale, num_samples // sizes.data, facts.outcome)
            )
        self._loss_reporter.step(facts.losses)
        self._write_curves(facts)
        if not self.prints(facts.step):
            return
        shown = ""  # where the script has computed the loss from the outputs
        if facts.losses:  # of rank 0: the loss is its own
            loss = torch.stack([value.float() for value in facts.losses]).mean().item()
            update_progress(loss=loss)
            shown = f"  loss {loss:.4f}{' of rank 0' if self._parts.mesh.sizes.data > 1 else ''}"
        rate = f"  {self.throughput.samples_per_s:.1f} samples/s" if self.throughput.samples_per_s else ""
        get_logger().info("step %d%s  lr %.3g  grad norm %.3g%s", facts.step, shown, facts.lr, norm(), rate)

    def _warn_of_new_path(self, step: int) -> None:
        num_changes = self._parts.sharded.schedule.num_path_changes
        if num_changes > self._num_path_changes and self._parts.policy.warns_of_new_paths and self._is_rank0:
            get_logger().warning(
                "step %d: the model used its modules in another order than before; nothing is fetched ahead then", step
            )
        self._num_path_changes = num_changes

    def _write_curves(self, facts: StepFacts) -> None:
        self._num_done += 1
        is_due = self._num_done % self._window == 0
        values = {"lr": facts.lr}
        if facts.loss_scale is not None:
            values["loss_scale"] = facts.loss_scale
        if self._timer is not None and is_due:
            values |= self._report_times(facts.step, self._timer)
        if self.curves:
            self._write_values(self.curves, facts, values)
        if self._memory:
            self._report_memory(facts.step, self._memory)
            self._memory.clear()
        if self._profile is not None:
            self._profile.after_step()
            self.profiled = self._profile.counted
            if self._profile.is_finished:
                self._profile = None

    def _write_values(self, curves: Curves, facts: StepFacts, values: dict[str, float]) -> None:
        if not facts.losses:
            curves.write(values, facts.num_samples)
            return
        loss = AsyncHostCopy(torch.stack([loss.float() for loss in facts.losses]).mean().double().reshape(1))
        if not self._parts.group.runtime.is_async_device:
            curves.write({"train_loss": loss.values()[0], **values}, facts.num_samples)
            return
        # A step later, when the device has passed this one: the host has read its norm.
        curves.write_behind(lambda: {"train_loss": loss.values()[0], **values}, facts.num_samples)

    def _report_times(self, step: int, timer: PhaseTimer) -> dict[str, float]:
        """Log the mean time of each phase, and return it as curves in milliseconds."""
        means_ms = {name: seconds * 1e3 / self._window for name, seconds in timer.take().items()}
        own = " · ".join(f"{name} {means_ms.get(name, 0.0):.2f} ms" for name in ("forward", "backward", "step"))
        waits = " · ".join(f"{name} {means_ms.get(name, 0.0):.2f} ms" for name in ("reduce", "gather"))
        get_logger().info("time at step %d: %s, of which waiting for %s (means of %d)", step, own, waits, self._window)
        return {f"elapsed_time_ms_{name}": value for name, value in means_ms.items()}

    def _report_memory(self, step: int, uses: dict[str, MemoryUse]) -> None:
        after = " · ".join(f"after {name} {use}" for name, use in uses.items())
        kind = "GPU, allocated" if self._device.type != "cpu" else "host, resident"
        peak_gib = max(use.peak_bytes for use in uses.values()) / GIB
        get_logger().info("memory at step %d: %s · peak %.2f GiB (%s)", step, after, peak_gib, kind)


def _communication(clock: StepClock, _kind: str) -> contextlib.AbstractContextManager[None]:
    """Return the context of a wait for a collective. Those of a save are part of the save."""
    return clock.inside(COMMUNICATION) if clock.is_in_thread() and not clock.is_in(SAVE) else _NOTHING


def _span_of_wait(timer: PhaseTimer, kind: str) -> contextlib.AbstractContextManager[None]:
    return timer.span("gather" if kind == "all_gather" else "reduce")


@dataclass(frozen=True)
class ProfiledStep:
    """What `flops_profiler` has counted of one micro-batch of one rank, in its forward."""

    flops: int
    macs: int  # multiplications with an addition
    params: int  # elements of the model's parameters, also where they are sharded


class _Profile:
    """`flops_profiler`: counts in step `profile_step`, takes the times in the step after it, and reports."""

    def __init__(self, settings: Config, device: torch.device, model: nn.Module, dtype: torch.dtype) -> None:
        self._section = settings.flops_profiler
        self._model = model
        self._peak = peak_flops(device, dtype)
        self._counter = FlopCounter(model)
        self._timer = PhaseTimer(device)
        self._step = 1  # the one that runs
        self._num_backwards = 0
        self.is_finished = False

    @property
    def counted(self) -> ProfiledStep | None:
        """What was counted; None before."""
        if self._counter.count is None:
            return None
        flops = self._counter.count.forward_total
        params = sum(map(unsharded_numel, self._model.parameters()))
        return ProfiledStep(flops, flops // 2, params)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count or time what runs inside, if it is this step's turn."""
        counter = self._counter
        if self._step == self._section.profile_step + 1:
            self._num_backwards += name == "backward"
            with self._timer.span(name):
                yield
            return
        is_turn = self._step == self._section.profile_step and counter.count is None
        if is_turn and name == "forward" and not counter.is_counting:
            counter.start()
        try:
            yield
        except BaseException:
            counter.stop()
            raise
        if name == "forward":
            counter.mark_forward()
        else:
            counter.stop()

    def after_step(self) -> None:
        """Report after the step that was timed."""
        if self._step > self._section.profile_step:
            self.is_finished = True
            if self._counter.count is not None:
                self._report()
        self._step += 1

    def _report(self) -> None:
        section, count = self._section, self._counter.count
        assert count is not None
        seconds = self._timer.take()
        num_micro = max(1, self._num_backwards)
        times = ProfileTimes(
            seconds.get("forward", 0.0) / num_micro, seconds.get("backward", 0.0) / num_micro, seconds.get("step", 0.0)
        )
        form = ProfileForm(section.module_depth, section.top_modules, section.detailed)
        title = f"FLOPs of step {section.profile_step}, rank 0, one micro-batch:"
        text = f"{title}\n{profile_text(self._model, count, times, form, self._peak)}"
        if section.output_file is None:
            get_logger().info("%s", text)
            return
        path = Path(section.output_file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
        get_logger().info("FLOPs of step %d are in %s", section.profile_step, path)
