"""What watches the collectives: nothing, unless a config asks; then calls are measured here.

A communicator asks twice a call whether anybody listens. Only the bytes sent are always counted: that is one addition.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from launcher.base.errors import EngineError
from launcher.base.log import get_logger
from launcher.comm.torch_internals import is_recorded


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


class Listener(Protocol):
    """Follows what a process begins, and waits for nothing."""

    def begins(self) -> None:
        """Take note that a collective is about to begin."""
        ...

    def has_begun(self, kind: str, process_group: dist.ProcessGroup, tensors: list[Tensor], what: str) -> None:
        """Take note of a collective that has begun. tensors: as of `Call.num_bytes`. what: for messages."""
        ...


WaitSpan = Callable[[str], contextlib.AbstractContextManager[None]]  # kind of collective -> context of the wait

_meters: list[Meter] = []
listeners: list[Listener] = []  # of this process; empty in a run that is not followed
_wait_spans: list[WaitSpan] = []
_step_span: WaitSpan | None = None  # that of the step's clock, which is one for all engines of the process
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


def follow_waits(span: WaitSpan) -> None:
    """Enter `span(kind)` around every wait for a collective, beside those of `add_wait_span`, from now on."""
    global _step_span
    _step_span = span


def wait_span() -> WaitSpan | None:
    """Return what is to be entered around a wait."""
    if not _wait_spans:
        return _step_span
    return _wait_spans[-1] if _step_span is None else _both_spans


def _both_spans(kind: str) -> contextlib.AbstractContextManager[Any]:
    stack = contextlib.ExitStack()
    for span in (_step_span, _wait_spans[-1]):
        if span is not None:
            stack.enter_context(span(kind))
    return stack


_no_span = contextlib.nullcontext()


def unit_span(what: str, unit: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that names what runs inside: in the trace of a profiler, and before it in the debug log.

    what: "gather" and the like. unit: the unit's label. Without either it costs about a microsecond; torch's own
    `record_function` costs ten times that also when nothing is recorded.
    """
    logger = get_logger()
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s of %s", what, unit)
    if not is_recorded():
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


# ---- The log of collectives ----
# Bus bandwidth is the algorithm's bandwidth times the share of its bytes that must cross a link, so that it can be
# compared with the hardware's: NCCL tests, doc/PERFORMANCE.md.


_OWN_FOLDER = str(Path(__file__).parent)


@dataclass(frozen=True)
class LogRules:
    """What to log; names are those of the config's `comms_logger`."""

    verbose: bool = False
    prof_all: bool = True
    debug: bool = False
    prof_ops: list[str] = field(default_factory=list)


class CommsLog:
    """Sums up the calls of this process by kind and size."""

    def __init__(self, rules: LogRules) -> None:
        self._rules = rules
        self._durations_s: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._world_size = 1

    def record(self, call: Call) -> None:
        """Take note of a finished call."""
        rules = self._rules
        if not rules.prof_all and call.kind not in rules.prof_ops:
            return
        kind = f"{call.kind} ({_caller()})" if rules.debug else call.kind
        self._world_size = call.world_size
        self._durations_s[kind, call.num_bytes].append(call.duration_s)
        if rules.verbose:
            gbps = bandwidths_gbps(call.kind, call.num_bytes, call.world_size, call.duration_s)
            get_logger().info(
                "comm op: %s | time: %.3f ms | message: %d bytes | algbw: %.2f Gbit/s | busbw: %.2f Gbit/s",
                kind,
                call.duration_s * 1e3,
                call.num_bytes,
                *gbps,
            )

    def durations_s(self) -> dict[tuple[str, int], list[float]]:
        """Return (kind, bytes) -> seconds of each call."""
        return {key: list(durations) for key, durations in sorted(self._durations_s.items())}

    def reset(self) -> None:
        """Forget all calls."""
        self._durations_s.clear()

    def totals(self) -> dict[tuple[str, int], tuple[int, float]]:
        """Return (kind, bytes) -> number of calls and their seconds together."""
        return {key: (len(durations), sum(durations)) for key, durations in sorted(self._durations_s.items())}

    def table(self, fastest_s: dict[tuple[str, int], float] | None = None) -> str:
        """Return the summary as text.

        fastest_s: the total of the rank that took least, by kind and size; what is above it is time spent waiting
        for stragglers.
        """
        header = f"{'collective':<24}{'bytes':>14}{'count':>8}{'total ms':>12}{'mean ms':>11}"
        header += f"{'algbw Gbit/s':>14}{'busbw Gbit/s':>14}" + (f"{'straggler ms':>14}" if fastest_s else "")
        lines = [header]
        for (kind, num_bytes), (count, total_s) in self.totals().items():
            algorithm, bus = bandwidths_gbps(kind.split(" ")[0], num_bytes, self._world_size, total_s / count)
            line = f"{kind:<24}{num_bytes:>14,}{count:>8,}{total_s * 1e3:>12.2f}{total_s * 1e3 / count:>11.3f}"
            line += f"{algorithm:>14.2f}{bus:>14.2f}"
            if fastest_s:
                line += f"{(total_s - fastest_s[kind, num_bytes]) * 1e3:>14.2f}"
            lines.append(line)
        return "\n".join(lines)


def bandwidths_gbps(kind: str, num_bytes: int, world_size: int, duration_s: float) -> tuple[float, float]:
    """Return the algorithm's and the bus bandwidth of one call in 10⁹ bit/s."""
    algorithm = num_bytes * 8 / 1e9 / max(duration_s, 1e-9)
    share = (world_size - 1) / world_size
    factor = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}.get(kind, 1.0)
    return algorithm, algorithm * factor


def _caller() -> str:
    """Return the function outside of this room that called a collective; of private ones, who called them."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename.startswith(_OWN_FOLDER) or frame.f_code.co_name.startswith("_")
    ):
        frame = frame.f_back
    return frame.f_code.co_name


_logs: list[CommsLog] = []  # of engines that live, the newest last


def start_log(rules: LogRules) -> CommsLog:
    """Log every collective of this process until `stop_log`. They block, so that their time is their own."""
    log = CommsLog(rules)
    _logs.append(log)
    add_meter(log)
    return log


def stop_log(log: CommsLog) -> None:
    """End a log; without another one collectives overlap with computation again."""
    _logs[:] = [each for each in _logs if each is not log]
    remove_meter(log)


def current_log() -> CommsLog | None:
    """Return the log that was started last, of those that have not ended."""
    return _logs[-1] if _logs else None


def log_summary(show_straggler: bool = False) -> str:
    """Log the summary of all collectives on rank 0, and return this rank's: of the engine that was built last.

    show_straggler: also show how much longer each took here than on the rank where it was quickest, which is time
    spent waiting for late ranks; then every rank must call it.
    Raises: EngineError when nothing is logged.
    """
    log = current_log()
    if log is None:
        raise EngineError("no collectives are logged", hint='set "comms_logger": {"enabled": true} in the config')
    fastest_s: dict[tuple[str, int], float] | None = None
    distributed = dist.is_initialized() and dist.get_world_size() > 1
    if show_straggler and distributed:
        everywhere: list[dict[tuple[str, int], tuple[int, float]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, log.totals())
        fastest_s = {key: min(totals[key][1] for totals in everywhere if key in totals) for key in log.totals()}
    table = log.table(fastest_s)
    if not distributed or dist.get_rank() == 0:
        get_logger().info("collectives of rank 0:\n%s", table)
    return table
