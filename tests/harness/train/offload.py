"""Test doubles of what stands between a device and host memory, for machines where both are the same memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar
from unittest import mock

import torch
from torch import Tensor

from launcher.comm.device import HostDeviceCopier
from launcher.comm.streams import PASSED, StreamEvent, Streams
from launcher.kernels.api import Span
from launcher.kernels.reference import ReferenceKernel
from launcher.zero.parameters import UnitParameters
from launcher.zero.unit import FlatUnit

Event = tuple[str, int]  # what happened, and to which unit


class LateCopier(HostDeviceCopier):
    """Copies as late as a GPU's may run: when somebody waits for them. Until then there are NaNs in the target.

    Whoever reads too early, or writes into what is still going to be copied, gets other results. As on a GPU, memory of
    the device outlives the copies that read it.
    """

    host: ClassVar[list[Tensor]] = []  # what `empty` has returned, of all links of this process

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        super().__init__(device, streams)
        self._queues: dict[bool, list[tuple[Tensor, Tensor]]] = {True: [], False: []}  # by "to the device"
        self._lock = threading.RLock()  # a delayed update waits in a thread of its own

    def empty(self, numel: int, dtype: torch.dtype, *, is_pinned: bool) -> Tensor:
        LateCopier.host.append(super().empty(numel, dtype, is_pinned=is_pinned))
        return LateCopier.host[-1]

    def is_on_device(self, tensor: Tensor) -> bool:
        return not is_in_host_memory(tensor)

    def copy(self, target: Tensor, source: Tensor) -> StreamEvent:
        if is_in_host_memory(target) == is_in_host_memory(source):
            target.copy_(source)
            return PASSED
        to_device = not is_in_host_memory(target)
        job = (target, source if to_device else source.clone())
        target.fill_(torch.nan)
        self._queues[to_device].append(job)
        return _LateCopy(self, to_device, job)

    def run_until(self, to_device: bool, job: tuple[Tensor, Tensor]) -> None:
        """Run what was asked for before `job`, and it, unless that has been done."""
        with self._lock:
            while self.is_waiting(to_device, job):
                self._run_first(to_device)

    def so_far(self) -> StreamEvent:
        return _AllSoFar(self)

    @property
    def is_done(self) -> bool:
        return not any(self._queues.values())

    def is_waiting(self, to_device: bool, job: tuple[Tensor, Tensor]) -> bool:
        return any(job is waiting for waiting in self._queues[to_device])

    def synchronize(self) -> None:
        with self._lock:
            for to_device, queue in self._queues.items():
                while queue:
                    self._run_first(to_device)

    def _run_first(self, to_device: bool) -> None:
        target, source = self._queues[to_device].pop(0)
        target.copy_(source)


@dataclass(frozen=True)
class _AllSoFar(StreamEvent):
    copier: LateCopier

    @property
    def has_passed(self) -> bool:
        return self.copier.is_done

    def synchronize(self) -> None:
        self.copier.synchronize()


@dataclass(frozen=True)
class _LateCopy(StreamEvent):
    copier: LateCopier
    to_device: bool
    job: tuple[Tensor, Tensor]

    @property
    def has_passed(self) -> bool:
        return not self.copier.is_waiting(self.to_device, self.job)

    def wait(self) -> None:
        self.copier.run_until(self.to_device, self.job)

    synchronize = wait


def is_in_host_memory(tensor: Tensor) -> bool:
    """Whether a tensor is, or is a view of, memory that a `LateCopier` gave."""
    storage = tensor.untyped_storage().data_ptr()
    return any(kept.untyped_storage().data_ptr() == storage for kept in LateCopier.host)


@contextlib.contextmanager
def late_link() -> Iterator[None]:
    """Give groups made within this block a `LateCopier`."""
    LateCopier.host.clear()
    with mock.patch("launcher.comm.device.HostDeviceCopier", LateCopier):
        yield


class Recorder:
    """Writes down when units are copied, updated and waited for. Use it around `initialize` and what follows."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._units: dict[int, tuple[str, int]] = {}  # storage -> what it is

    def know(self, units: Sequence[FlatUnit]) -> None:
        """Learn the engine's units by their memory."""
        for unit in units:
            assert unit.grads is not None
            for name, tensor in (
                ("gradient to host", unit.grads.optimizer_grad),
                ("update to device", unit.params.shard),
                ("update", unit.params.master),
                ("fetch", unit.params.flat),
            ):
                self._units.setdefault(tensor.untyped_storage()._cdata, (name, unit.index))

    def note(self, name: str, index: int) -> None:
        self.events.append((name, index))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Record within this block. Updates are taken by the reference kernel."""
        recorder, copy, wait = self, HostDeviceCopier.copy, UnitParameters.wait

        class Kernel(ReferenceKernel):
            def update(self, spans: Sequence[Span], grad_scale: float = 1.0) -> None:
                for span in spans:
                    recorder.note("update", recorder._units[span.master.untyped_storage()._cdata][1])
                super().update(spans, grad_scale)

        def recorded_copy(link: HostDeviceCopier, target: Tensor, source: Tensor) -> StreamEvent:
            known = recorder._units.get(target.untyped_storage()._cdata)
            if known is not None:
                recorder.note(*known)
            return copy(link, target, source)

        def recorded_wait(params: UnitParameters) -> None:
            if params._gather is not None:
                recorder.note("wait", recorder._units[params.flat.untyped_storage()._cdata][1])
            wait(params)

        with (
            mock.patch("launcher.engine.optimizer_plan.kernel_for", return_value=Kernel()),
            mock.patch.object(HostDeviceCopier, "copy", recorded_copy),
            mock.patch.object(UnitParameters, "wait", recorded_wait),
        ):
            yield
