"""What watches the collectives: nothing, unless a config asks; then calls are measured here.

`collectives` asks twice a call whether anybody listens. Only the bytes sent are always counted: that is one addition.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from launcher.base.log import get_logger


@dataclass(frozen=True)
class Call:
    """One finished collective."""

    kind: str  # as torch.distributed names it
    num_bytes: int  # of the whole buffer: what a rank has after a gather, or before a reduction
    world_size: int
    duration_s: float


class Meter(Protocol):
    """Takes the measure of every collective. While there is one, each call is waited for before it returns."""

    def record(self, call: Call) -> None:
        """Take note of a finished call."""
        ...


WaitSpan = Callable[[str], contextlib.AbstractContextManager[None]]  # kind of collective -> context of the wait

_meters: list[Meter] = []
_wait_spans: list[WaitSpan] = []
_sent = [0]  # bytes so far


def add_meter(meter: Meter) -> None:
    """Measure every collective of this process with `meter` too, until `remove_meter`."""
    _meters.append(meter)


def remove_meter(meter: Meter) -> None:
    """Measure no more with `meter`; those of other engines continue."""
    _meters[:] = [each for each in _meters if each is not meter]


def add_wait_span(span: WaitSpan) -> None:
    """Enter `span(kind)` around every wait for a collective, until `remove_wait_span`. The last one added holds."""
    _wait_spans.append(span)


def remove_wait_span(span: WaitSpan) -> None:
    """Enter `span` no more; the one before it holds again."""
    _wait_spans[:] = [each for each in _wait_spans if each is not span]


def wait_span() -> WaitSpan | None:
    """Return what is to be entered around a wait."""
    return _wait_spans[-1] if _wait_spans else None


_no_span = contextlib.nullcontext()


def unit_span(what: str, unit: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that names what runs inside: in the trace of a profiler, and before it in the debug log.

    what: "gather" and the like. unit: the unit's label. Without either it costs about a microsecond; torch's own
    `record_function` costs ten times that also when nothing is recorded.
    """
    logger = get_logger()
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s of %s", what, unit)
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return _no_span
    return torch.autograd.profiler.record_function(f"launch: {what} of {unit}")


def note_sent(num_bytes: int) -> None:
    """Count bytes that a collective sends from this rank to others."""
    _sent[0] += num_bytes


def sent_bytes() -> int:
    """Return the bytes this process has sent in collectives so far; where a backend chooses the way, the least."""
    return _sent[0]


def begin(device: torch.device) -> float | None:
    """Return the time at which a call begins; None when nothing measures."""
    if not _meters:
        return None
    _synchronize(device)
    return time.perf_counter()


def end(begun_s: float, kind: str, world_size: int, tensors: list[Tensor], device: torch.device) -> None:
    """Report a call that has finished on this rank."""
    _synchronize(device)
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    call = Call(kind, num_bytes, world_size, time.perf_counter() - begun_s)
    for meter in _meters:
        meter.record(call)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
