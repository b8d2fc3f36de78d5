"""Inputs of checkpointed functions in host memory, and their way there and back beside the computing.

An input leaves while its function and the next one are computed: for so long its memory on the device is held. Backward
needs the inputs in the opposite order of the calls, so that those of the call before come back while a function is
recomputed. The computing waits for events, never the host. What is still on the device when backward asks for it, as
the inputs of the last two calls are, does not travel.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from launcher.comm.device import DeviceRuntime, HostDeviceCopier
from launcher.comm.streams import PASSED, StreamEvent
from launcher.storage.store import padded


@dataclass(eq=False)
class CallInputs:
    """The inputs of one call that are away, and the call before it."""

    before: weakref.ref[CallInputs] | None
    inputs: list[weakref.ref[OffloadedInput]] = field(default_factory=list)

    def alive(self) -> list[OffloadedInput]:
        """Return those that autograd may still ask for."""
        return [found for one in self.inputs if (found := one()) is not None]


@dataclass(eq=False)
class OffloadedInput:
    """An input whose elements are in host memory, or on their way there or back."""

    row: Tensor  # 1-D, host memory
    call: CallInputs
    on_device: Tensor | None  # 1-D: all of it, while it leaves and from when it is fetched on
    event: StreamEvent  # when the copy of `on_device`, to or from the row, has ended


class OffloadedInputs:
    """Sends inputs to host memory and brings them back. For calls, and their backward, of one thread at a time."""

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._device = runtime.device
        self._copier = runtime.copier
        self._leaving: deque[OffloadedInput] = deque()
        self._fetched: list[OffloadedInput] = []
        self._last: weakref.ref[CallInputs] | None = None

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is on a device, and not in host memory already."""
        return self._copier.is_async and self._copier.is_on_device(tensor)

    def begin_call(self) -> CallInputs:
        """Return what the inputs of a call are sent with. The computing waits for those of the last call but one."""
        self.settle()
        before = None if self._last is None else self._last()
        while self._leaving and self._leaving[0].call is not before:
            self._free(self._leaving.popleft())
        call = CallInputs(self._last)
        self._last = weakref.ref(call)
        return call

    def send(self, call: CallInputs, elements: Tensor, row: Tensor) -> OffloadedInput:
        """Copy 1-D `elements`, which no later work may write, to a row of host memory. Returns at once."""
        sent = OffloadedInput(row, call, elements, self._copier.copy(row, elements))
        call.inputs.append(weakref.ref(sent))
        self._leaving.append(sent)
        return sent

    def bring(self, wanted: OffloadedInput) -> Tensor:
        """Return the elements on the device, the caller's own; begin to fetch the inputs of the call before."""
        if wanted not in self._fetched:
            self._fetch(wanted.call)
        before = wanted.call.before() if wanted.call.before is not None else None
        if before is not None:
            self._fetch(before)
        self._fetched.remove(wanted)
        elements = wanted.on_device
        assert elements is not None, "fetched above"
        self._free(wanted)
        return elements

    def settle(self) -> None:
        """Free the memory on the device of what was fetched and never asked for."""
        while self._fetched:
            self._free(self._fetched.pop())

    def end(self) -> None:
        """Free all memory on the device: nothing is sent from here on."""
        self.settle()
        while self._leaving:
            self._free(self._leaving.popleft())

    def _fetch(self, call: CallInputs) -> None:
        """Have all inputs of a call on the device, or on their way."""
        for one in call.alive():
            if one in self._fetched:
                continue
            if one.on_device is not None:  # it has not left
                self._leaving.remove(one)
            else:
                one.on_device = torch.empty(one.row.numel(), dtype=one.row.dtype, device=self._device)
                one.event = self._copier.copy(one.on_device, one.row)
            self._fetched.append(one)

    def _free(self, one: OffloadedInput) -> None:
        """Let the memory on the device go, for work that the computing queues after the copy."""
        one.event.wait()
        one.event, one.on_device = PASSED, None


class HostRows:
    """Page-locked host memory, a piece for each input; it holds no more than the most that was taken at a time."""

    def __init__(self, copier: HostDeviceCopier) -> None:
        self._copier = copier
        self._free: defaultdict[int, list[torch.UntypedStorage]] = defaultdict(list)  # bytes -> pieces
        self._free_bytes = self._taken_bytes = self._peak_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory with undefined content, 1-D; see `give_back_after`."""
        num_bytes = padded(numel * dtype.itemsize)
        self._taken_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._taken_bytes)
        if self._free[num_bytes]:
            self._free_bytes -= num_bytes
            return torch.empty(0, dtype=dtype).set_(self._free[num_bytes].pop(), 0, (numel,), (1,))
        while self._free_bytes and self._taken_bytes + self._free_bytes > self._peak_bytes:
            size = next(size for size, pieces in self._free.items() if pieces)
            self._free[size].pop()
            self._free_bytes -= size
        return self._copier.empty(num_bytes // dtype.itemsize, dtype, is_pinned=True)[:numel]

    def give_back_after(self, owner: object, row: Tensor) -> None:
        """Take a row from `take` back once its owner is gone. Copies from and to it must be ordered before the next."""
        weakref.finalize(owner, self._give_back, row.untyped_storage()).atexit = False

    def _give_back(self, piece: torch.UntypedStorage) -> None:
        self._free[piece.nbytes()].append(piece)
        self._free_bytes += piece.nbytes()
        self._taken_bytes -= piece.nbytes()
