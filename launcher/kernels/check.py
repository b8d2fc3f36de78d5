"""Whether a kernel computes on the device at hand what the reference computes: a small fixed input, a few milliseconds.

An untested compiler, driver or GPU may compute wrong numbers without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from launcher.kernels.api import DeviceScale, Kernel, Lamb, Rule, Span
from launcher.kernels.reference import ReferenceKernel

_LENGTHS = (2048, 1031)  # whole blocks of a program, and a part of one that begins at no multiple of 16 bytes
_GAP = 3
_SCALE = 0.375  # exact in fp32
_RATE = 0.25  # so large that no step is lost in the rounding of a 16-bit weight
_TOLERANCE = 1e-5  # relative to the largest number of a tensor; roundings of 16 bits come on top
_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class SpanTypes:
    """The types of a span's tensors."""

    master: torch.dtype = torch.float32
    grad: torch.dtype = torch.float32
    state: torch.dtype = torch.float32
    param: torch.dtype | None = None


def update_problem(kernel: Kernel, rule: Rule, num_states: int, types: SpanTypes, device: torch.device) -> str | None:
    """Say what is wrong with the steps that `kernel` takes by `rule` on `device`; None: they are the reference's.

    num_states: of a span. Raises what the kernel raises where it cannot run.
    """
    rule = replace(rule, lr=_RATE)
    expected, found = (_spans(rule, num_states, types, place) for place in (torch.device("cpu"), device))
    before = [tensor.cpu().clone() for span in found for tensor in _written(span)]
    kernel.update(found, _device_scale(_SCALE, skip=True, device=device))
    if any(not torch.equal(a, b.cpu()) for a, b in zip(before, _all_written(found), strict=True)):
        return f"writes in a step that is to be skipped, by {type(rule).__name__}"
    if isinstance(rule, Lamb):
        moments = kernel.lamb_moments(found, _SCALE).cpu()
        if not torch.allclose(moments, ReferenceKernel().lamb_moments(expected, _SCALE), rtol=_TOLERANCE):
            return f"computes other norms than the reference, by {type(rule).__name__}"
    ReferenceKernel().update(expected, _SCALE)
    kernel.update(found, _device_scale(_SCALE, skip=False, device=device))
    for mine, truth in zip(_all_written(found), _all_written(expected), strict=True):
        error = _error(mine.cpu(), truth)
        if not error <= _TOLERANCE + _ROUNDING.get(mine.dtype, 0.0):
            return f"computes other steps than the reference, by {type(rule).__name__}: the difference is {error:.1e}"
    return None


def norm_problem(kernel: Kernel, device: torch.device) -> str | None:
    """Say what is wrong with what `kernel` measures of gradients on `device`; None: it is the reference's."""
    grads = [_wave(length, 0.7) for length in _LENGTHS]
    expected, nowhere = ReferenceKernel().measure(grads)
    found, place = kernel.measure([grad.to(device) for grad in grads])
    error = _error(found.cpu().reshape(1), expected.reshape(1))
    if not error <= _TOLERANCE:
        return f"computes another norm than the reference: the difference is {error:.1e}"
    grads[-1][-1] = torch.nan
    _, bad_place = kernel.measure([grad.to(device) for grad in grads])
    is_right = torch.equal(place.cpu(), nowhere) and bad_place.tolist() == [len(grads) - 1, len(grads[-1]) - 1]
    return None if is_right else "finds another gradient that is not finite than the reference"


def edits_problem(take_edits: Callable[[Tensor, Tensor], None], dtype: torch.dtype, device: torch.device) -> str | None:
    """Say what is wrong with what `take_edits` makes of a master; None: nothing is. dtype: of the values."""
    for length in _LENGTHS:
        master = _wave(length, 0.31).to(device)
        values = torch.where(_wave(length, 0.7).to(device) > 0.9, 0.5, master).to(dtype)
        expected = torch.where(values != master.to(dtype), values.float(), master)
        take_edits(master, values)
        if not torch.equal(master, expected):
            return "takes over other values than torch"
    return None


def _device_scale(factor: float, *, skip: bool, device: torch.device) -> DeviceScale:
    return DeviceScale(torch.tensor(factor, device=device), torch.tensor(float(skip), device=device))


def _spans(rule: Rule, num_states: int, types: SpanTypes, device: torch.device) -> list[Span]:
    """Return spans of one memory, with the same numbers on every device. The sums of two states are positive."""
    numel = sum(_LENGTHS) + _GAP
    master, grad = _wave(numel, 0.31).to(types.master), _wave(numel, 0.7).to(types.grad)
    states = [(_wave(numel, 0.1 + index).square() + 1e-3).to(types.state) for index in range(num_states)]
    param = None if types.param is None else master.to(types.param)
    on_device = [tensor.to(device, copy=True) for tensor in (master, grad, *states)]
    whole = Span(rule, on_device[0], on_device[1], tuple(on_device[2:]), None if param is None else param.to(device))
    starts = (0, _LENGTHS[0] + _GAP)
    return [_part(whole, slice(start, start + length)) for start, length in zip(starts, _LENGTHS, strict=True)]


def _wave(numel: int, frequency: float) -> Tensor:
    return torch.sin(torch.arange(numel, dtype=torch.float64) * frequency + 0.5).float()


def _part(span: Span, place: slice) -> Span:
    states = tuple(state[place] for state in span.states)
    param = None if span.param is None else span.param[place]
    return replace(span, master=span.master[place], grad=span.grad[place], states=states, param=param)


def _written(span: Span) -> list[Tensor]:
    return [tensor for tensor in (span.master, *span.states, span.param) if tensor is not None]


def _all_written(spans: list[Span]) -> list[Tensor]:
    return [tensor for span in spans for tensor in _written(span)]


def _error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest number that is expected."""
    difference = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
    return float(difference)
