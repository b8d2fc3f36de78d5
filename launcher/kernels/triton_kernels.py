"""Optimizer kernels for GPUs, in Triton: every span of a call in one launch.

A launch reads three tables on the device. What is uploaded, and when:

* The table of spans (int64 [num_spans, 9]: lengths, first blocks, addresses): when a call brings spans at other
  addresses than the last `_NUM_KEPT` calls did. In training that is in the first step, where the memory of gradients
  lasts: the engine updates, and measures, all units in one call each.
* The span of each block (int32 [num_blocks]): when a call brings spans of other lengths.
* The table of hyper-parameters (fp32 [num_spans, 9]): when one of them has changed. With Adam that is in every step,
  because of its bias corrections, which are computed here in fp64.

Uploads go from pinned memory and do not wait: torch keeps a pinned block until the copy that was queued from it is
done. `grad_scale` is an argument of the launch, or in the device's memory with the decision to skip. So a step never
waits for the device, and because Triton specialises on none of these numbers, it compiles once for each rule and set of
dtypes.

Spans whose tensors all begin at multiples of 16 bytes are moved 16 bytes at a time, except for their last block; others
work, element by element. Spans of other dtypes than the rest of the call cost a launch of their own.

Tables belong to the stream that was current when they were made: use a kernel on one stream.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from launcher.kernels import check
from launcher.kernels.api import Adagrad, Adam, DeviceScale, GradScale, Kernel, Lamb, Lion, Rule, Span
from launcher.kernels.check import SpanTypes
from launcher.kernels.program_shape import (
    DEFAULT_SHAPE,
    ProgramShape,
    choose_shape,
    key_of,
    median_update_s,
    span_to_measure,
)

CHUNK_NUMEL = 1024  # partial sums that one program adds at a time
_NUM_KEPT = 16
_ALIGNMENT_BYTES = 16
_MAX_STATES = 2
_NUM_FACTORS = 9

_Tensors = tuple[Tensor | None, ...]  # of a span: gradient, master, parameter, two states; None for what is not there
_Dtypes = tuple[torch.dtype | None, ...]  # of these


@dataclass(frozen=True)
class _Part:
    """Spans of a call that have the same dtypes."""

    places: list[int]  # of the spans within the call
    tensors: list[_Tensors]

    @property
    def device(self) -> torch.device:
        return _gradient(self.tensors[0]).device

    @property
    def dtypes(self) -> _Dtypes:
        return _dtypes_of(self.tensors[0])


@dataclass(frozen=True)
class _Tables:
    """Where the spans of a launch are, on the device."""

    spans: Tensor  # int64 [num_spans, 9], columns as in `triton_device`
    block_spans: Tensor  # int32 [num_blocks]
    shape: ProgramShape


class TritonKernel:
    """The update protocol on tensors of one GPU; with TRITON_INTERPRET=1, on tensors of the CPU.

    Raises:
        ImportError: Triton is not installed, or cannot be loaded.
    """

    def __init__(self, shape: ProgramShape = DEFAULT_SHAPE) -> None:
        """shape: of the programs, but where `choose_shape` finds a faster one."""
        import triton

        from launcher.kernels import triton_device

        self._code = triton_device
        self._language = triton.language
        self._shape = shape
        self._chosen: dict[tuple[str, torch.device, _Dtypes], ProgramShape] = {}  # of updates: by rule, device, types
        self.is_interpreted = not isinstance(triton_device.update, triton.JITFunction)
        self.name = f"Triton {triton.__version__}" + (", interpreted" if self.is_interpreted else "")
        self._table = lru_cache(_NUM_KEPT)(_upload_table)
        self._block_spans = lru_cache(_NUM_KEPT)(_upload_block_spans)
        self._factors = lru_cache(_NUM_KEPT)(_upload_factors)

    def update(self, spans: Sequence[Span], grad_scale: GradScale = 1.0) -> None:
        """Update every span from its gradient times `grad_scale`."""
        for part in _parts([_tensors_of(span) for span in spans]):
            rule = type(spans[0].rule).__name__
            shape = self._chosen.get((rule, part.device, part.dtypes), self._shape)
            tables, factors = self._tables_of(part, shape), self._factors_of(part, spans)
            if isinstance(grad_scale, DeviceScale):
                decision = grad_scale.factor, grad_scale.skip
                self._launch(self._code.update_unless_skipped, part, tables, factors, *decision, RULE=rule)
            else:
                self._launch(self._code.update, part, tables, factors, float(grad_scale), RULE=rule)

    def choose_shape(self, rule: Rule, num_states: int, types: SpanTypes, device: torch.device) -> None:
        """Take the fastest shape of programs for updates by rules of a kind on spans of these types on a GPU.

        The first call on a kind of GPU compiles and measures several, with 0.4 GB of its memory; later ones read what
        it has found from a file. num_states: of a span. Raises nothing: see `program_shape`.
        """
        device = torch.empty(0, device=device).device  # with its index
        states = [types.state] * num_states + [None] * (_MAX_STATES - num_states)
        place = type(rule).__name__, device, (types.grad, types.master, types.param, *states)
        if place in self._chosen:
            return
        example = cache(partial(span_to_measure, rule, num_states, types, device))

        def measure(shape: ProgramShape) -> float:
            self._chosen[place] = shape
            span, scale = example()
            return median_update_s(lambda: self.update([span], scale))

        self._chosen[place] = choose_shape(key_of(rule, num_states, types, device), measure)
        example.cache_clear()
        torch.cuda.empty_cache()  # what was measured with is the model's again

    def lamb_moments(self, spans: Sequence[Span], grad_scale: float = 1.0) -> Tensor:
        """Update the moments of LAMB; return fp64 [num_spans, 2]: sums of squares of weights and directions."""
        sums = torch.empty(len(spans), 2, dtype=torch.float64, device=spans[0].master.device)
        for part in _parts([_tensors_of(span) for span in spans]):
            tables, factors = self._tables_of(part, self._shape), self._factors_of(part, spans)
            partials = sums.new_empty(len(tables.block_spans), 2)
            self._launch(self._code.lamb_moments, part, tables, factors, float(grad_scale), partials)
            with torch.cuda.device_of(sums):
                self._code.sum_blocks_of_spans[(len(part.places), 2)](
                    tables.spans, partials, sums, BLOCK=self._shape.block_numel, CHUNK=CHUNK_NUMEL
                )
        return sums

    def sum_of_squares(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the sum of squares of all elements, scalar fp64 on their device: the same bits every time."""
        return torch.stack([partials.sum() for _, _, partials in self._squares(grads)]).sum()

    def measure(self, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of squares, and where the first element is that is not finite: as `Kernel.measure` does.

        What is searched is the sums of the blocks, and one block.
        """
        totals, found = [], []
        for part, tables, partials in self._squares(grads):
            totals.append(partials.sum())
            if not len(partials):
                continue
            place = torch.empty(2, dtype=torch.int64, device=part.device)
            block = partials.isfinite().logical_not_().int().argmax()  # the first of the largest
            self._launch(self._code.first_bad_element, part, tables, block, place, num_programs=1)
            found.append(place)
        total = torch.stack(totals).sum()
        if not found:
            return total, torch.full((2,), -1, dtype=torch.int64, device=total.device)
        places = torch.stack(found)
        order = torch.where(places[:, 0] < 0, len(grads), places[:, 0])
        return total, places.index_select(0, order.argmin(keepdim=True))[0]

    def _squares(self, grads: Sequence[Tensor]) -> Iterator[tuple[_Part, _Tables, Tensor]]:
        """Yield the parts of a call with the sum of squares of each block, fp64 [num_blocks]."""
        for part in _parts([(grad, None, None, None, None) for grad in grads]):
            tables = self._tables_of(part, self._shape)
            partials = torch.empty(len(tables.block_spans), dtype=torch.float64, device=part.device)
            self._launch(self._code.sum_of_squares, part, tables, partials)
            yield part, tables, partials

    def take_edits(self, master: Tensor, values: Tensor) -> None:
        """Write to fp32 `master` the bf16 or fp16 `values` that differ from it rounded: 1-D, contiguous, of one length.

        Where nothing differs nothing is written: 6 bytes an element are read.
        """
        is_bf16 = values.dtype == torch.bfloat16
        numel, block = master.numel(), self._shape.block_numel
        with torch.cuda.device_of(master):
            self._code.take_edits[(-(-numel // block),)](
                master,
                values.view(torch.int16) if is_bf16 else values,
                numel,
                IS_BF16=is_bf16,
                BLOCK=block,
                num_warps=self._shape.num_warps,
            )

    def _launch(
        self,
        kernel: Any,
        part: _Part,
        tables: _Tables,
        *arguments: Tensor | float,
        num_programs: int | None = None,
        **constants: str,
    ) -> None:
        """Start so many programs; None: one for each block of the spans of `part`."""
        if not len(tables.block_spans):
            return
        with torch.cuda.device_of(tables.spans):
            kernel[(num_programs or len(tables.block_spans),)](
                tables.spans,
                tables.block_spans,
                *arguments,
                DTYPES=self._dtypes(part),
                BLOCK=tables.shape.block_numel,
                **constants,
                num_warps=tables.shape.num_warps,
                enable_fp_fusion=False,
            )

    def _dtypes(self, part: _Part) -> tuple[Any, ...]:
        """Return Triton's names for the dtypes of a span's tensors."""
        names = (None if dtype is None else str(dtype).removeprefix("torch.") for dtype in part.dtypes)
        return tuple(None if name is None else getattr(self._language, name) for name in names)

    def _tables_of(self, part: _Part, shape: ProgramShape) -> _Tables:
        rows = tuple(
            (place, _gradient(tensors).numel(), *(0 if tensor is None else tensor.data_ptr() for tensor in tensors))
            for place, tensors in zip(part.places, part.tensors, strict=True)
        )
        block_spans = self._block_spans(tuple(numel for _, numel, *_ in rows), shape.block_numel, part.device)
        return _Tables(self._table(rows, shape.block_numel, part.device), block_spans, shape)

    def _factors_of(self, part: _Part, spans: Sequence[Span]) -> Tensor:
        return self._factors(tuple(factors_of(spans[place].rule) for place in part.places), part.device)


def _tensors_of(span: Span) -> _Tensors:
    return (span.grad, span.master, span.param, *span.states, *[None] * (_MAX_STATES - len(span.states)))


def _gradient(tensors: _Tensors) -> Tensor:
    assert tensors[0] is not None
    return tensors[0]


def _dtypes_of(tensors: _Tensors) -> _Dtypes:
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


def _parts(spans: list[_Tensors]) -> list[_Part]:
    """Sort the spans of a call by their dtypes: nearly always there is one part."""
    parts: dict[_Dtypes, _Part] = {}
    for place, tensors in enumerate(spans):
        part = parts.setdefault(_dtypes_of(tensors), _Part([], []))
        part.places.append(place)
        part.tensors.append(tensors)
    return list(parts.values())


def _upload_table(rows: tuple[tuple[int, ...], ...], block_numel: int, device: torch.device) -> Tensor:
    """Make the table of spans. rows: of each span its place in the call, its length and its five addresses."""
    first_blocks = accumulate((-(-numel // block_numel) for _, numel, *_ in rows), initial=0)
    table = [
        [numel, first_block, place, all(address % _ALIGNMENT_BYTES == 0 for address in addresses), *addresses]
        for (place, numel, *addresses), first_block in zip(rows, first_blocks, strict=False)
    ]
    return to_device(torch.tensor(table), device)


def _upload_block_spans(numels: tuple[int, ...], block_numel: int, device: torch.device) -> Tensor:
    """Make the table of which span each block is of."""
    num_blocks = torch.tensor([-(-numel // block_numel) for numel in numels])
    return to_device(torch.arange(len(numels), dtype=torch.int32).repeat_interleave(num_blocks), device)


def _upload_factors(rows: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    """Make the table of hyper-parameters: fp64 until here, fp32 from here on, as in torch."""
    table = [row + (0.0,) * (_NUM_FACTORS - len(row)) for row in rows]
    return to_device(torch.tensor(table, dtype=torch.float32), device)


def to_device(table: Tensor, device: torch.device) -> Tensor:
    """Queue the copy of a table and do not wait for it."""
    return table if device.type == "cpu" else table.pin_memory().to(device, non_blocking=True)


def factors_of(rule: Rule) -> tuple[float, ...]:
    """Return what the kernel of `rule` multiplies with: one row of the table of hyper-parameters."""
    if isinstance(rule, Adam):
        correction1, correction2 = _bias_corrections(rule)
        decay, l2 = (rule.lr * rule.weight_decay, 0.0) if rule.is_decoupled else (0.0, rule.weight_decay)
        moments = 1 - rule.beta1, rule.beta2, 1 - rule.beta2
        return *moments, math.sqrt(correction2), rule.eps, rule.lr / correction1, 1 - decay, l2
    if isinstance(rule, Lamb):
        inside, after = (rule.eps, 0.0) if rule.is_eps_inside_root else (0.0, rule.eps)
        moments = 1 - rule.beta1, rule.beta2, 1 - rule.beta2
        return *moments, *_bias_corrections(rule), inside, after, rule.weight_decay, rule.lr * rule.trust_ratio
    if isinstance(rule, Adagrad):
        return rule.lr / (1 + (rule.step - 1) * rule.lr_decay), rule.weight_decay, rule.eps
    if isinstance(rule, Lion):
        kept = 1 - rule.lr * rule.weight_decay
        return rule.lr, kept, rule.beta1, 1 - rule.beta1, rule.beta2, 1 - rule.beta2
    flags = float(rule.is_first), float(rule.is_nesterov)
    return rule.lr, rule.weight_decay, rule.momentum, 1 - rule.dampening, *flags


def _bias_corrections(rule: Adam | Lamb) -> tuple[float, float]:
    return (1 - rule.beta1**rule.step, 1 - rule.beta2**rule.step) if rule.corrects_bias else (1.0, 1.0)


# ---- whether there is one ----


def load_triton_kernel() -> Kernel | None:
    """Return the kernel for GPUs, or None; `triton_problem` says why. Imports Triton at the first call."""
    kernel = find_triton_kernel()
    return None if isinstance(kernel, str) else kernel


def triton_problem() -> str | None:
    """Say why there is no kernel, or return None where there is one."""
    kernel = find_triton_kernel()
    return kernel if isinstance(kernel, str) else None


def take_edits(master: Tensor, values: Tensor) -> bool:
    """Do what `TritonKernel.take_edits` does, where there is a kernel that does it right. Returns whether."""
    if master.device.type != "cuda" or master.dtype != torch.float32:
        return False
    kernel = find_triton_kernel()
    if isinstance(kernel, str) or values.dtype not in (torch.bfloat16, torch.float16):
        return False
    if _takes_edits(kernel, master.device, values.dtype) and master.numel():
        kernel.take_edits(master, values)
        return True
    return False


@cache
def _takes_edits(kernel: TritonKernel, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel does it right on a device, which is tried once and waited for."""
    try:
        return not check.edits_problem(kernel.take_edits, dtype, device)
    except Exception:  # noqa: BLE001  # Triton's errors derive from Exception itself
        return False


@cache
def find_triton_kernel() -> TritonKernel | str:
    """Return the kernel for GPUs, or why there is none."""
    try:
        kernel = TritonKernel()
    except (ImportError, OSError) as error:  # not installed, or its library does not fit this system
        return f"Triton cannot be loaded: {error}"
    if not torch.cuda.is_available():
        return kernel
    if kernel.is_interpreted:
        return "TRITON_INTERPRET is set, and interpreted kernels cannot read a GPU's memory"
    try:
        problem = check.norm_problem(kernel, torch.device("cuda"))
    except Exception as error:  # noqa: BLE001  # Triton's errors derive from Exception itself
        return f"Triton cannot compile: {(str(error) or type(error).__name__).splitlines()[0]}"
    return kernel if problem is None else f"Triton {problem}"
