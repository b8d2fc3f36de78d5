"""The FLOPs of a model by module, counted by torch while one micro-batch runs.

Counting slows the step down, so the times come from the step after it.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from launcher.comm.torch_internals import FlopMode, has_dispatch_mode, may_be_compiled

if TYPE_CHECKING:  # it imports triton: 0.15 s that only those pay who count
    from torch.utils.flop_counter import FlopCounterMode

Clock = Callable[[], float]  # seconds
_COUNT_AFTER_S = 10.0  # of training
# Dense peak of 16-bit matrix products, FLOP/s, from the vendors' data sheets; the first of these words that the
# device's name has counts.
PEAK_FLOPS_16BIT = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10": 125e12,
    "A10G": 70e12,
    "V100": 125e12,
    "RTX 4090": 165e12,
    "T4": 65e12,
}
_OTHER_CHIPS = re.compile(r"\b(Laptop|Max-Q|MIG|RTX 4090 D)\b")


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak of a device in this precision; None where it is not known."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def peak_flops_of(name: str) -> float | None:
    """Return the peak in 16 bits of a device as CUDA names it; None where it is not known.

    "RTX A1000" is no A100, laptops have other chips under a name of the same words, and a MIG device is a part of one.
    """
    if _OTHER_CHIPS.search(name):
        return None
    return next((peak for word, peak in PEAK_FLOPS_16BIT.items() if re.search(rf"\b{word}\b", name)), None)


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one micro-batch on one rank. Module names are as in `named_modules()`, "" for the model."""

    forward: dict[str, int]
    backward_total: int

    @property
    def forward_total(self) -> int:
        return self.forward.get("", 0)


class FlopCounter:
    """Counts from `start()`, before a forward, until `stop()`, after its backward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._mode: FlopCounterMode | None = None
        self._forward: dict[str, int] = {}
        self.count: FlopCount | None = None  # once it has counted

    @property
    def is_counting(self) -> bool:
        return self._mode is not None

    def start(self) -> None:
        """Count from here on."""
        from torch.utils.flop_counter import FlopCounterMode

        self._mode = FlopCounterMode(display=False, custom_mapping=_cpu_attention())
        self._mode.__enter__()

    def mark_forward(self) -> None:
        """Note that the forward has run; what follows counts as backward."""
        if self._mode is not None:
            self._forward = self._by_module(self._mode)

    def stop(self) -> None:
        """Count no more."""
        mode, self._mode = self._mode, None
        if mode is None:
            return
        mode.__exit__(None, None, None)
        self.count = FlopCount(self._forward, mode.get_total_flops() - self._forward.get("", 0))

    def _by_module(self, mode: FlopCounterMode) -> dict[str, int]:
        prefix = type(self._model).__name__ + "."
        flops: dict[str, int] = {"": mode.get_total_flops()}
        for name, by_operation in mode.get_flop_counts().items():
            if name.startswith(prefix):
                flops[name.removeprefix(prefix)] = sum(by_operation.values())
        # Containers that are never called, such as ModuleList, have what their items have.
        for name, module in reversed(list(self._model.named_modules())):
            if name not in flops:
                flops[name] = sum(flops.get(f"{name}.{child}", 0) for child, _ in module.named_children())
        return flops


def _cpu_attention() -> dict[Any, Any]:
    """Return formulas for the CPU's attention kernel, which torch's registry leaves out; they are the GPU's."""
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    def forward(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(sdpa_backward_flop_count(grad, query, key, value))

    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }


class ModelFlops:
    """Counts the FLOPs of one micro-batch for the journal, once, when a training has lasted for a while.

    Counting slows the micro-batch down and imports much, which a run of seconds need not pay for. A backward that the
    script calls itself, and a model that recomputes, count as twice their forward: there the counter would lie within
    autograd, or count the recomputation. Where something else sees each operation, or has compiled them, none counts.
    """

    def __init__(self, num_micro_batches: int, *, recomputes: bool, clock: Clock = time.monotonic) -> None:
        """num_micro_batches: of an optimizer step."""
        self._num_micro_batches, self._recomputes, self._clock = num_micro_batches, recomputes, clock
        self._start_s = clock()
        self._forward: int | None = None  # of the micro-batch that is counted
        self._import = threading.Thread(target=_import_counter, name="flops", daemon=True)
        self.is_over = False

    @contextlib.contextmanager
    def phase(self, name: str, *, is_called: bool) -> Iterator[dict[str, int]]:
        """Count a forward or a backward if it is the one to be counted. Yields what becomes the record.

        is_called: the engine itself calls backward.
        """
        record: dict[str, int] = {}
        is_first = self._forward is None
        counts = (name == "forward" and is_first and self._is_due()) or (name == "backward" and not is_first)
        if self.is_over or not counts or has_dispatch_mode() or may_be_compiled():
            yield record
            return
        backward = 2 * (self._forward or 0)
        if name == "forward" or (is_called and not self._recomputes):
            with FlopMode() as mode:
                yield record
            if name == "forward":
                self._forward = mode.total
                return
            backward = mode.total
        else:
            yield record
        self.is_over = True
        record.update(flops=(self._forward or 0) + backward, micro_batches=self._num_micro_batches)

    def _is_due(self) -> bool:
        """Whether the training has lasted for a while, and what counting needs is imported: beside the training."""
        if self._clock() - self._start_s < _COUNT_AFTER_S:
            return False
        if not self._import.is_alive() and self._import.ident is None:
            self._import.start()
        return not self._import.is_alive()


def _import_counter() -> None:
    importlib.import_module("torch.utils.flop_counter")


@dataclass(frozen=True)
class ProfileTimes:
    """Seconds of one micro-batch's forward and backward, and of the optimizer step."""

    forward_s: float
    backward_s: float
    step_s: float


@dataclass(frozen=True)
class ProfileForm:
    """How much of a profile is printed; names are those of the config's `flops_profiler`."""

    module_depth: int = -1  # -1: all
    top_modules: int = 1
    detailed: bool = True


def profile_text(
    model: nn.Module, count: FlopCount, times: ProfileTimes, form: ProfileForm, peak_flops_per_s: float | None
) -> str:
    """Return a profile as text."""
    total = count.forward_total + count.backward_total
    compute_s = times.forward_s + times.backward_s
    rows = [
        ("parameters", _short(sum(parameter.numel() for parameter in model.parameters())).strip()),
        ("forward", f"{_short(count.forward_total)}FLOP in {times.forward_s * 1e3:.2f} ms"),
        ("backward", f"{_short(count.backward_total)}FLOP in {times.backward_s * 1e3:.2f} ms"),
        ("optimizer step", f"{times.step_s * 1e3:.2f} ms"),
        ("rate of forward and backward", f"{_short(total / max(compute_s, 1e-9))}FLOP/s"),
    ]
    if peak_flops_per_s is not None:
        share = total / max(compute_s, 1e-9) / peak_flops_per_s
        rows.append(("model FLOPs utilization", f"{share:.1%} of {_short(peak_flops_per_s)}FLOP/s"))
    lines = [f"  {name:<30}{value}" for name, value in rows]
    lines += ["  by depth, forward:", *_by_depth(count, form)]
    if form.detailed:
        lines += ["  by module, forward:", *_by_module(model, count, form)]
    return "\n".join(lines)


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _by_depth(count: FlopCount, form: ProfileForm) -> list[str]:
    levels: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for name, flops in count.forward.items():
        if name and (form.module_depth < 0 or _depth(name) <= form.module_depth):
            levels[_depth(name)].append((flops, name))
    lines = []
    for depth, entries in sorted(levels.items()):
        top = sorted(entries, key=lambda entry: (-entry[0], entry[1]))[: form.top_modules]
        shown = " · ".join(f"{name} {_short(flops)}FLOP" for flops, name in top)
        lines.append(f"    depth {depth}: {shown}")
    return lines


def _by_module(model: nn.Module, count: FlopCount, form: ProfileForm) -> list[str]:
    lines = []
    whole = max(1, count.forward_total)
    for name, module in model.named_modules():
        if form.module_depth >= 0 and _depth(name) > form.module_depth:
            continue
        flops = count.forward.get(name, 0)
        numel = sum(parameter.numel() for parameter in module.parameters())
        indent = "  " * _depth(name)
        title = f"{indent}{name.rpartition('.')[2] or '(model)'} {type(module).__name__}"
        lines.append(f"    {title:<48}{_short(numel).strip():>10} params {_short(flops):>10}FLOP {flops / whole:>7.1%}")
    return lines


def _short(value: float) -> str:
    """Return a number with a prefix of the decimal system and a space: 1234 -> "1.23 k"."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 1000:
            return f"{value:.0f} {prefix}" if prefix == "" else f"{value:.2f} {prefix}"
        value /= 1000
    return f"{value:.2f} P"
