"""Which shape of Triton's programs updates fastest on a GPU: measured at the first use, then read from a file.

A program takes `block_numel` elements with `num_warps` warps. Which shape moves most bytes a second depends on the GPU,
on the rule and on the types of the tensors. Every shape writes the same bits, so ranks may choose differently. What
sums over blocks (norms, the first pass of LAMB) keeps one shape: there the order of additions would change.

The file lies in Triton's own cache (`TRITON_CACHE_DIR`, by default ~/.triton/cache), beside the compiled kernels.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launcher.base.log import get_logger
from launcher.kernels.api import DeviceScale, Rule, Span
from launcher.kernels.check import SpanTypes

# Elements on a rank, of one rule and one set of types. With fewer an update reads and writes less than 4 GB, and the
# memory that the measurement takes could be the peak of the run.
LEAST_NUMEL = 2**27
_MEASURED_NUMEL = 2**23
_LEAST_GAIN = 0.02  # a shape is taken in place of the default only where it is so much faster: less is noise
_FILE_NAME = "program_shape.json"


@dataclass(frozen=True)
class ProgramShape:
    """How much one program updates, and with how many warps of 32 threads."""

    block_numel: int  # a power of two, at least 16
    num_warps: int


DEFAULT_SHAPE = ProgramShape(1024, 4)  # 8 elements for each of 128 threads: 16 bytes of a 16-bit gradient
CANDIDATES = (DEFAULT_SHAPE, *(ProgramShape(*each) for each in ((512, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8))))

Measure = Callable[[ProgramShape], float]  # returns the seconds of an update


def choose_shape(key: str, measure: Measure) -> ProgramShape:
    """Return the fastest shape for what `key` says; measure every one unless a file of an earlier run tells.

    key: everything that the choice depends on. A shape that cannot run is left out.
    """
    manager = _cache_manager(key)
    kept = None if manager is None else _read(manager)
    if kept is not None:
        return kept
    start_s = time.perf_counter()
    seconds: dict[ProgramShape, float] = {}
    for shape in CANDIDATES:
        try:
            seconds[shape] = measure(shape)
        except Exception as error:  # noqa: BLE001  # Triton's errors derive from Exception itself; memory may lack, too
            get_logger().debug("optimizer kernel: %s cannot be measured: %s", shape, error)
    chosen = fastest(seconds)
    gain = seconds[DEFAULT_SHAPE] / seconds[chosen] if DEFAULT_SHAPE in seconds else 1.0
    get_logger().info(
        "optimizer kernel: %d elements a program and %d warps, %.2f times as fast as %d and %d, found in %.1f s",
        *(chosen.block_numel, chosen.num_warps, gain, DEFAULT_SHAPE.block_numel, DEFAULT_SHAPE.num_warps),
        time.perf_counter() - start_s,
    )
    if manager is not None and seconds:
        with contextlib.suppress(Exception):  # a full or read-only disk: the next run measures again
            manager.put(json.dumps(asdict(chosen)), _FILE_NAME, binary=False)
    return chosen


def fastest(seconds: Mapping[ProgramShape, float]) -> ProgramShape:
    """Return the shape with the fewest seconds; the default where none is faster by more than noise."""
    best = min(seconds, key=seconds.__getitem__, default=DEFAULT_SHAPE)
    default_s = seconds.get(DEFAULT_SHAPE)
    return DEFAULT_SHAPE if default_s is not None and seconds[best] > default_s * (1 - _LEAST_GAIN) else best


def key_of(rule: Rule, num_states: int, types: SpanTypes, device: torch.device) -> str:
    """Return what a choice depends on: the GPU, the compiler, the kernels' source, the rule and what a span has."""
    import triton

    from launcher.kernels import triton_device

    source = hashlib.sha256(Path(str(triton_device.__file__)).read_bytes()).hexdigest()
    facts = torch.cuda.get_device_name(device), triton.__version__, source, type(rule).__name__, num_states, types
    return hashlib.sha256(repr((facts, CANDIDATES)).encode()).hexdigest()


def median_update_s(update: Callable[[], None]) -> float:
    """Return the median of the device's seconds of an update, with nothing of it in the L2 cache before."""
    import triton.testing

    return float(triton.testing.do_bench(update, warmup=5, rep=40, return_mode="median")) / 1e3


def span_to_measure(rule: Rule, num_states: int, types: SpanTypes, device: torch.device) -> tuple[Span, DeviceScale]:
    """Return a span of `_MEASURED_NUMEL` elements, and the scale by which a step behind the host updates it.

    The rate is 0, so that any number of updates leaves finite weights.
    """

    def filled(dtype: torch.dtype) -> Tensor:
        return torch.full((_MEASURED_NUMEL,), 0.25, dtype=dtype, device=device)

    states = tuple(filled(types.state) for _ in range(num_states))
    param = None if types.param is None else filled(types.param)
    scale = DeviceScale(torch.ones((), device=device), torch.zeros((), device=device))
    return Span(replace(rule, lr=0.0), filled(types.master), filled(types.grad), states, param), scale


def _cache_manager(key: str) -> Any:
    """Return Triton's manager of the files of one key, None where it can make no folder."""
    from triton.runtime.cache import get_cache_manager

    try:
        return get_cache_manager(key)
    except Exception:  # noqa: BLE001  # TRITON_CACHE_MANAGER may name a class with errors of its own
        return None


def _read(manager: Any) -> ProgramShape | None:
    """Return what an earlier run has chosen, None where there is no file that can be read."""
    try:
        path = manager.get_file(_FILE_NAME)
        found = None if path is None else ProgramShape(**json.loads(Path(path).read_text()))
    except Exception:  # noqa: BLE001  # as above
        return None
    return found if found in CANDIDATES else None
