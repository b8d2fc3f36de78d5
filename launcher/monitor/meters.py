"""What a training measures of itself: samples a second, times of parts, memory, the loss. None waits for a GPU."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from launcher.base import env
from launcher.base.progress import update_progress
from launcher.comm.device import device_module


class ThroughputTimer:
    """Measures wall time between optimizer steps.

    The first step is left out: it pays for lazy initialisation (kernels, buffers, data workers). Scripts for DeepSpeed
    read the attributes as `engine.tput_timer`: times of micro-steps, from the third optimizer step on.
    """

    def __init__(
        self, batch_size: int, steps_per_print: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """batch_size: samples of an optimizer step, over all ranks."""
        self.batch_size = batch_size
        self._steps_per_print = max(1, steps_per_print)
        self._clock = clock
        self._window_start_s: float | None = None
        self._window_num_steps = 0
        self._seen_first_step = False
        self.samples_per_s = 0.0  # of the last complete window, 0.0 before there is one
        self.initialized = False  # `start` was called
        self.started = False  # a micro-step runs
        self.start_step = 2  # the optimizer steps before the first that is measured
        self.start_time = self.end_time = 0.0  # of the last micro-step that was measured
        self.micro_step_count = self.global_step_count = 0
        self.step_elapsed_time = self.total_elapsed_time = 0.0  # of the optimizer step under way, of all

    def start(self) -> None:
        """Mark the start of a micro-step; only the first one of a window sets the clock."""
        self.initialized = self.started = True
        if self.global_step_count >= self.start_step:
            self.start_time = self._clock()
        if self._seen_first_step and self._window_start_s is None:
            self._window_start_s = self._clock()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Mark the end of a micro-step; `global_step` says that an optimizer step was taken.

        report_speed: of DeepSpeed's signature; the engine reports.
        """
        if self.started:
            self._count(global_step)
        if not global_step:
            return
        if not self._seen_first_step:
            self._seen_first_step = True
            return
        if self._window_start_s is None:
            return
        self._window_num_steps += 1
        elapsed_s = self._clock() - self._window_start_s
        if elapsed_s > 0:
            self.samples_per_s = self.batch_size * self._window_num_steps / elapsed_s
        if self._window_num_steps >= self._steps_per_print:
            self._window_start_s = None
            self._window_num_steps = 0

    def _count(self, global_step: bool) -> None:
        self.started = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self.start_time > 0:
            self.end_time = self._clock()
            duration_s = self.end_time - self.start_time
            self.step_elapsed_time += duration_s
            self.total_elapsed_time += duration_s
            if global_step:
                self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second of all measured steps; -1 before there is one."""
        num_measured = self.global_step_count - self.start_step
        if num_measured <= 0 or not self.total_elapsed_time:
            return -1.0
        return self.batch_size * num_measured / self.total_elapsed_time


# ---- Memory in use ----


GIB = 2**30


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in use now and at most so far: of the GPU's allocator, or resident on the host."""

    used_bytes: int
    peak_bytes: int

    def __str__(self) -> str:
        return f"{self.used_bytes / GIB:.2f} GiB"


def memory_use(device: torch.device) -> MemoryUse:
    """Return what this process uses on `device`."""
    if device.type != "cpu":
        module = device_module(device)
        return MemoryUse(module.memory_allocated(device), module.max_memory_allocated(device))
    resident_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return MemoryUse(resident_bytes, max(resident_bytes, peak_bytes))  # the kernel brings its peak up to date lazily


@dataclass(frozen=True)
class HostMemory:
    """Memory of this machine."""

    total_bytes: int
    available_bytes: int  # without swapping


def host_memory() -> HostMemory:
    """Return what the kernel says of this machine's memory."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kib = {line[0].rstrip(":"): int(line[1]) for line in lines}
    return HostMemory(kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024)


# ---- The loss for the panel ----


INTERVAL_S = 1.0  # agents ask as often


class LossReporter:
    """Reports a rank's loss about once a second. On a GPU it is reported when its asynchronous copy is there."""

    def __init__(self, *, is_wanted: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """is_wanted: whether this rank's loss is the one that is shown."""
        self._is_wanted = is_wanted and env.PROGRESS_FILE.name in os.environ
        self._clock = clock
        self._next_s = clock()
        self._copy: tuple[Tensor, torch.Event] | None = None  # being copied to the host

    def step(self, losses: Sequence[Tensor]) -> None:
        """Note the losses of the micro-batches of one step: detached scalars."""
        if not self._is_wanted:
            return
        if self._copy is not None and self._copy[1].query():
            update_progress(loss=self._copy[0].item())
            self._copy = None
        if not losses or self._copy is not None or self._clock() < self._next_s:
            return
        self._next_s = self._clock() + INTERVAL_S
        mean = torch.stack([loss.float() for loss in losses]).mean()
        if mean.device.type == "cpu":
            update_progress(loss=mean.item())
        elif mean.device.type != "meta":
            host = torch.empty((), pin_memory=True)
            host.copy_(mean, non_blocking=True)
            module = device_module(mean.device)
            arrival = module.Event()
            arrival.record(module.current_stream(mean.device))
            self._copy = (host, arrival)


# ---- Times of the parts of a step ----


class PhaseTimer:
    """Adds up the time of named phases. Phases may lie within each other.

    On a CPU this is wall time. On a GPU it is the device's time, by events that are read only in `take()`.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else device_module(device)
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.Event, torch.Event]] = []

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count what runs inside to phase `name`."""
        if self._module is not None:
            first, last = (self._module.Event(enable_timing=True) for _ in range(2))
            first.record()
            try:  # a recomputation ends in an exception of torch's as soon as it has all it needs
                yield
            finally:
                last.record()
                self._events.append((name, first, last))
        else:
            start_s = time.perf_counter()
            try:
                yield
            finally:
                self._seconds[name] += time.perf_counter() - start_s

    def take(self) -> dict[str, float]:
        """Return the seconds of every phase since the last call. On a GPU this waits for it."""
        for name, first, last in self._events:
            last.synchronize()
            self._seconds[name] += first.elapsed_time(last) / 1e3
        self._events.clear()
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds
