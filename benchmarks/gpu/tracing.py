"""What a profile of some steps says: how busy the device was, what ran beside what, and what the host waited for."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

Spans = list[tuple[float, float]]  # begin and end in microseconds
WAITS = ("cudaMemcpy", "cudaMalloc", "cudaFree")  # beside all that are named Synchronize
CALLS = (
    *("cudaMemcpyAsync", "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    *("cudaStreamWaitEvent", "cudaEventRecord", "cudaHostAlloc", "cudaHostRegister"),
)
COPIES = ("HtoD", "DtoH", "DtoD")


def union(spans: Spans) -> Spans:
    """Return the same time as spans in order that do not meet."""
    merged: Spans = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def length(spans: Spans) -> float:
    """Return the sum of all spans."""
    return sum(stop - start for start, stop in spans)


def common(one: Spans, other: Spans) -> float:
    """Return the time that two unions share."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


class _Trace:
    """The events of a trace by what they are."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.spans: defaultdict[str, Spans] = defaultdict(list)  # of "compute", "collectives" and each of COPIES
        self.copied_bytes: Counter[str] = Counter()
        self.kernels_us: Counter[str] = Counter()
        self.num_kernels = 0
        self.calls: Counter[str] = Counter()
        self.waited_us: Counter[str] = Counter()
        for event in events:
            self._take(event, event.get("name", ""), event.get("cat", ""), float(event.get("dur", 0)))

    def _take(self, event: dict[str, Any], name: str, category: str, duration_us: float) -> None:
        span = (float(event["ts"]), float(event["ts"]) + duration_us)
        if category == "kernel":
            self.num_kernels += 1
            self.kernels_us[name[:60]] += duration_us  # type: ignore[assignment]
            self.spans["collectives" if "nccl" in name.lower() else "compute"].append(span)
        elif category == "gpu_memcpy":
            kind = next((each for each in COPIES if each in name), "DtoD")
            self.copied_bytes[kind] += event.get("args", {}).get("bytes", 0)
            self.spans[kind].append(span)
        elif category in ("cuda_runtime", "cuda_driver"):
            is_wait = "Synchronize" in name or name in WAITS
            self.calls[name] += is_wait or name in CALLS
            if is_wait:
                self.waited_us[name] += duration_us  # type: ignore[assignment]


def summary(path: Path, num_steps: int) -> dict[str, Any]:
    """Return the facts of a Chrome trace of `num_steps` steps; times are milliseconds a step."""
    trace = _Trace([event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"])
    computing = union(trace.spans["compute"])
    busy = union([span for spans in trace.spans.values() for span in spans])
    if not busy:
        return {"detail": "the device has left no events in the trace"}
    wall_us, bus = busy[-1][1] - busy[0][0], [*trace.spans["HtoD"], *trace.spans["DtoH"]]
    a_step = 1e3 * num_steps

    def hidden(spans: Spans) -> float | None:
        merged = union(spans)
        return common(merged, computing) / length(merged) if merged else None

    both = common(union(trace.spans["HtoD"]), union(trace.spans["DtoH"]))
    return {
        "wall_ms": wall_us / a_step,
        "compute_ms": length(computing) / a_step,
        "idle_of_compute": 1 - length(computing) / wall_us,
        "bus_ms": length(union(bus)) / a_step,
        "bus_hidden": hidden(bus),
        "both_ways_ms": both / a_step,
        "H2D_GB": trace.copied_bytes["HtoD"] / 1e9 / num_steps,
        "D2H_GB": trace.copied_bytes["DtoH"] / 1e9 / num_steps,
        "collectives_ms": length(union(trace.spans["collectives"])) / a_step,
        "collectives_hidden": hidden(trace.spans["collectives"]),
        "kernels": trace.num_kernels / num_steps,
        "waits_ms": {name: us / a_step for name, us in trace.waited_us.most_common(6)},
        "calls": {name: count / num_steps for name, count in trace.calls.most_common(8) if count},
        "longest_kernels_ms": {name: us / a_step for name, us in trace.kernels_us.most_common(6)},
    }
