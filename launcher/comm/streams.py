"""What runs beside the computing on a device: side streams by name, and what waits for what.

[Note: side streams] The model computes on the stream that is current when the engine is called, one stream for the
whole run. What the engine does beside it has a stream for each purpose (`Side`). Work of one stream runs in the order
in which it was queued; between streams nothing is ordered but by an event: recorded on the one, waited for on the
other. A collective of NCCL runs on a stream of NCCL's own, which waits for the stream that is current when the
collective is started; `wait()` makes the stream that is current then wait for it. So a collective that is started
within `on(side)` waits for that side alone, not for the computing.

Computing fills a GPU for milliseconds at a time. What takes a small part of the device, and what other ranks or the
computing itself wait for, goes ahead of it: the sides of gathers and reductions, and NCCL's own streams
(`further_options` of `comm.groups`), have high priority. It says which thread blocks start next, and stops none.

The host waits for nothing here except in `synchronize`, of streams or of an event. On a CPU there is one order, that of
the calls: all of this does nothing then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor


class Side(Enum):
    """A stream beside that of the computing."""

    GATHER = auto()  # starts all-gathers of parameters; its memory is that of unsharded parameters
    REDUCE = auto()  # starts reductions of gradients, and works on what they leave: sums, norms, conversions
    TO_DEVICE = auto()  # copies from host memory; a bus carries both directions at once
    TO_HOST = auto()  # copies to host memory
    RECEIVE = auto()  # starts receives from other stages of a pipeline; its memory is that of what arrives


_PRIORITY = {Side.GATHER: -1, Side.REDUCE: -1}  # below 0 is high; a copy needs no thread block


class StreamEvent:
    """A point in the work of one stream; of this class, one that has been reached."""

    @property
    def has_passed(self) -> bool:
        """Whether it has been reached."""
        return True

    def wait(self) -> None:
        """Have what is queued on the current stream from here on wait for it. The host does not wait."""

    def synchronize(self) -> None:
        """Block the host until it is reached. Any thread may call it."""


PASSED = StreamEvent()
_NO_CONTEXT: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class Streams:
    """The side streams of one device; of this class, none: the device works while the host waits, as a CPU does."""

    is_async = False  # whether the device works beside the host

    def on(self, side: Side) -> contextlib.AbstractContextManager[None]:
        """Return a context in which `side` is the current stream. It waits for nothing by itself."""
        return _NO_CONTEXT

    def current(self) -> Side | None:
        """Return the side that is the current stream; None: the computing is."""
        return None

    def record(self) -> StreamEvent:
        """Return the point that the current stream's work so far reaches."""
        return PASSED

    def join(self, side: Side) -> None:
        """Have what is queued on the current stream from here on wait for all of a side's work so far."""

    def keep(self, tensor: Tensor, side: Side) -> None:
        """Keep a tensor's memory, which the allocator may get back at any time, for a side's work so far."""

    def record_stream(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor that is freed until the current stream has done its work so far."""

    def synchronize(self, *sides: Side) -> None:
        """Block the host until all work of these sides has ended."""


class _DeviceEvent(StreamEvent):
    def __init__(self, module: Any, device: torch.device, event: Any) -> None:
        self._module, self._device, self._event = module, device, event

    def wait(self) -> None:
        self._module.current_stream(self._device).wait_event(self._event)

    @property
    def has_passed(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()


class DeviceStreams(Streams):
    """Of a GPU."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        """device: any for which torch has streams."""
        self._device = device
        self._module = torch.get_device_module(device)
        self._sides = {side: self._module.Stream(device, priority=_PRIORITY.get(side, 0)) for side in Side}

    @contextlib.contextmanager
    def on(self, side: Side) -> Iterator[None]:
        with self._module.stream(self._sides[side]):
            yield

    def current(self) -> Side | None:
        current = self._module.current_stream(self._device)  # torch is asked: autograd calls hooks in its own threads
        return next((side for side, stream in self._sides.items() if stream == current), None)

    def record(self) -> StreamEvent:
        event = self._module.current_stream(self._device).record_event()
        return _DeviceEvent(self._module, self._device, event)

    def join(self, side: Side) -> None:
        self._module.current_stream(self._device).wait_stream(self._sides[side])

    def keep(self, tensor: Tensor, side: Side) -> None:
        tensor.record_stream(self._sides[side])

    def record_stream(self, tensor: Tensor) -> None:
        tensor.record_stream(self._module.current_stream(self._device))

    def synchronize(self, *sides: Side) -> None:
        for side in sides:
            self._sides[side].synchronize()


def streams_of(device: torch.device) -> Streams:
    """Return the side streams of a device."""
    return Streams() if device.type == "cpu" else DeviceStreams(device)
