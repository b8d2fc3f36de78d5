"""The Triton kernels themselves: what one program does with one block of one span.

`launcher.kernels.triton_kernels` launches them and says what the tables hold. All arithmetic is fp32, in the order of
`launcher.kernels.reference`. Launch without fusing of products and sums: where torch fuses them there is an `fma` here,
and nowhere else, because Lion takes the sign of a sum that may cancel. Division and square root are those of IEEE 754,
as in torch.

This file is loaded on first use. TRITON_INTERPRET=1 must stand in the environment before that, if it is to hold.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns of a row of the table of spans, int64 [num_spans, NUM_COLUMNS]. GRAD and those after it are addresses.
NUMEL = tl.constexpr(0)
FIRST_BLOCK = tl.constexpr(1)
OUTPUT_ROW = tl.constexpr(2)
IS_ALIGNED = tl.constexpr(3)  # every address is a multiple of 16 bytes
GRAD = tl.constexpr(4)
MASTER = tl.constexpr(5)
PARAM = tl.constexpr(6)
STATE_0 = tl.constexpr(7)
STATE_1 = tl.constexpr(8)
NUM_COLUMNS = tl.constexpr(9)
NUM_FACTORS = tl.constexpr(9)  # columns of the table of hyper-parameters, fp32 [num_spans, NUM_FACTORS]


# ---- kernels, one program for each block ----


@triton.jit
def update(
    table: tl.tensor,
    block_spans: tl.tensor,
    factors: tl.tensor,
    grad_scale: tl.tensor,
    RULE: tl.constexpr,
    DTYPES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update one block by the rule of the name RULE. DTYPES: of gradient, master, parameter, states; None for none."""
    _update_program(table, block_spans, factors, grad_scale, RULE, DTYPES, BLOCK)


@triton.jit
def update_unless_skipped(
    table: tl.tensor,
    block_spans: tl.tensor,
    factors: tl.tensor,
    grad_scale: tl.tensor,
    skip: tl.tensor,
    RULE: tl.constexpr,
    DTYPES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Do what `update` does, if `skip` is 0. grad_scale, skip: addresses of one fp32 number each."""
    if tl.load(skip) == 0:
        _update_program(table, block_spans, factors, tl.load(grad_scale), RULE, DTYPES, BLOCK)


@triton.jit
def _update_program(
    table: tl.tensor,
    block_spans: tl.tensor,
    factors: tl.tensor,
    grad_scale: tl.tensor,
    RULE: tl.constexpr,
    DTYPES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    span = tl.load(block_spans + tl.program_id(0))
    row = table + span * NUM_COLUMNS
    factor = factors + span * NUM_FACTORS
    if _is_plain(row, BLOCK):
        _update_block(row, factor, grad_scale, RULE, DTYPES, BLOCK, True)
    else:
        _update_block(row, factor, grad_scale, RULE, DTYPES, BLOCK, False)


@triton.jit
def lamb_moments(
    table: tl.tensor,
    block_spans: tl.tensor,
    factors: tl.tensor,
    grad_scale: tl.tensor,
    partials: tl.tensor,
    DTYPES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update one block of LAMB's moments. partials: fp64 [num_blocks, 2], squares of weights and of directions."""
    span = tl.load(block_spans + tl.program_id(0))
    row = table + span * NUM_COLUMNS
    factor = factors + span * NUM_FACTORS
    partial = partials + 2 * tl.program_id(0)
    if _is_plain(row, BLOCK):
        _lamb_moments_block(row, factor, partial, grad_scale, DTYPES, BLOCK, True)
    else:
        _lamb_moments_block(row, factor, partial, grad_scale, DTYPES, BLOCK, False)


@triton.jit
def sum_of_squares(
    table: tl.tensor, block_spans: tl.tensor, partials: tl.tensor, DTYPES: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Sum the squares of one block of gradients. partials: fp64 [num_blocks]."""
    row = table + tl.load(block_spans + tl.program_id(0)) * NUM_COLUMNS
    partial = partials + tl.program_id(0)
    if _is_plain(row, BLOCK):
        _square_block(row, partial, DTYPES, BLOCK, True)
    else:
        _square_block(row, partial, DTYPES, BLOCK, False)


@triton.jit
def first_bad_element(
    table: tl.tensor,
    block_spans: tl.tensor,
    block: tl.tensor,
    place: tl.tensor,
    DTYPES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Find the first gradient in one block that is not finite. Grid: 1. block: address of its number, int64.

    place: int64 [2], receives the row of the span's output and the element in the span; -1, -1 where all are finite.
    """
    number = tl.load(block)
    row = table + tl.load(block_spans + number) * NUM_COLUMNS
    start = (number - tl.load(row + FIRST_BLOCK)) * BLOCK
    lanes = tl.arange(0, BLOCK)
    exist = lanes < tl.load(row + NUMEL) - start
    grad = _read(row + GRAD, start, lanes, exist, DTYPES[0], False)
    first = tl.min(tl.where(exist & ~(tl.abs(grad) < float("inf")), lanes, BLOCK))
    tl.store(place, tl.where(first < BLOCK, tl.load(row + OUTPUT_ROW), -1))
    tl.store(place + 1, tl.where(first < BLOCK, start + first, -1))


@triton.jit
def sum_blocks_of_spans(
    table: tl.tensor, partials: tl.tensor, sums: tl.tensor, BLOCK: tl.constexpr, CHUNK: tl.constexpr
) -> None:
    """Add up the partial sums of one span, always in the same order. Grid: num_spans, 2. sums: fp64 [..., 2]."""
    row = table + tl.program_id(0) * NUM_COLUMNS
    column = tl.program_id(1)
    start = tl.load(row + FIRST_BLOCK)
    end = start + tl.cdiv(tl.load(row + NUMEL), BLOCK)
    total = tl.zeros((CHUNK,), tl.float64)
    while start < end:
        blocks = start + tl.arange(0, CHUNK)
        total += tl.load(partials + 2 * blocks + column, mask=blocks < end, other=0.0)
        start += CHUNK
    tl.store(sums + 2 * tl.load(row + OUTPUT_ROW) + column, tl.sum(total))


@triton.jit
def take_edits(
    master: tl.tensor, values: tl.tensor, numel: tl.tensor, IS_BF16: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Write the values that are not the rounded master to it. values: bits of bf16 as int16, or fp16."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exist = places < numel
    before = tl.load(master + places, mask=exist, other=0.0)
    found = tl.load(values + places, mask=exist, other=0)
    if IS_BF16:
        wide = ((found.to(tl.uint32) & 0xFFFF) << 16).to(tl.float32, bitcast=True)
        rounded = (_bf16_bits(before).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = found.to(tl.float32)
        rounded = before.to(tl.float16).to(tl.float32)
    tl.store(master + places, wide, mask=exist & (wide != rounded))


# ---- one block ----


@triton.jit
def _is_plain(row: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Tell whether the block is a full one at aligned addresses: then threads move 16 bytes at once, unmasked."""
    stop = (tl.program_id(0) - tl.load(row + FIRST_BLOCK) + 1) * BLOCK
    return (stop <= tl.load(row + NUMEL)) & (tl.load(row + IS_ALIGNED) != 0)


@triton.jit
def _elements(row: tl.tensor, BLOCK: tl.constexpr, IS_PLAIN: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return where the block begins in its span (int64), the numbers of its elements (int32), and which exist."""
    start = (tl.program_id(0) - tl.load(row + FIRST_BLOCK)) * BLOCK
    lanes = tl.arange(0, BLOCK)
    exist = tl.full((BLOCK,), True, tl.int1) if IS_PLAIN else lanes < tl.load(row + NUMEL) - start
    return start, lanes, exist


@triton.jit
def _update_block(
    row: tl.tensor,
    factor: tl.tensor,
    grad_scale: tl.tensor,
    RULE: tl.constexpr,
    DTYPES: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_PLAIN: tl.constexpr,
) -> None:
    start, lanes, exist = _elements(row, BLOCK, IS_PLAIN)
    grad = _read(row + GRAD, start, lanes, exist, DTYPES[0], IS_PLAIN) * grad_scale
    master = _read(row + MASTER, start, lanes, exist, DTYPES[1], IS_PLAIN)
    if DTYPES[3] is not None:
        state_0 = _read(row + STATE_0, start, lanes, exist, DTYPES[3], IS_PLAIN)
    if DTYPES[4] is not None:
        state_1 = _read(row + STATE_1, start, lanes, exist, DTYPES[4], IS_PLAIN)

    if RULE == "Adam":
        master, state_0, state_1 = _adam(master, grad, state_0, state_1, factor)
    elif RULE == "Adagrad":
        master, state_0 = _adagrad(master, grad, state_0, factor)
    elif RULE == "Lion":
        master, state_0 = _lion(master, grad, state_0, factor)
    elif RULE == "Lamb":
        master = tl.fma(_lamb_direction(master, state_0, state_1, factor), -tl.load(factor + 8), master)
    elif DTYPES[3] is not None:
        master, state_0 = _sgd_with_momentum(master, grad, state_0, factor)
    else:
        master = tl.fma(_with_weight_decay(grad, master, tl.load(factor + 1)), -tl.load(factor), master)

    _write(row + MASTER, start, lanes, exist, master, DTYPES[1], IS_PLAIN)
    if DTYPES[2] is not None:
        _write(row + PARAM, start, lanes, exist, master, DTYPES[2], IS_PLAIN)
    if RULE != "Lamb":
        if DTYPES[3] is not None:
            _write(row + STATE_0, start, lanes, exist, state_0, DTYPES[3], IS_PLAIN)
        if DTYPES[4] is not None:
            _write(row + STATE_1, start, lanes, exist, state_1, DTYPES[4], IS_PLAIN)


@triton.jit
def _lamb_moments_block(
    row: tl.tensor,
    factor: tl.tensor,
    partial: tl.tensor,
    grad_scale: tl.tensor,
    DTYPES: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_PLAIN: tl.constexpr,
) -> None:
    start, lanes, exist = _elements(row, BLOCK, IS_PLAIN)
    grad = _read(row + GRAD, start, lanes, exist, DTYPES[0], IS_PLAIN) * grad_scale
    master = _read(row + MASTER, start, lanes, exist, DTYPES[1], IS_PLAIN)
    exp_avg = _read(row + STATE_0, start, lanes, exist, DTYPES[3], IS_PLAIN)
    exp_avg_sq = _read(row + STATE_1, start, lanes, exist, DTYPES[4], IS_PLAIN)
    exp_avg, exp_avg_sq = _moments(exp_avg, exp_avg_sq, grad, factor)
    _write(row + STATE_0, start, lanes, exist, exp_avg, DTYPES[3], IS_PLAIN)
    _write(row + STATE_1, start, lanes, exist, exp_avg_sq, DTYPES[4], IS_PLAIN)
    tl.store(partial, _sum_of_squares(master, exist))
    tl.store(partial + 1, _sum_of_squares(_lamb_direction(master, exp_avg, exp_avg_sq, factor), exist))


@triton.jit
def _square_block(
    row: tl.tensor, partial: tl.tensor, DTYPES: tl.constexpr, BLOCK: tl.constexpr, IS_PLAIN: tl.constexpr
) -> None:
    start, lanes, exist = _elements(row, BLOCK, IS_PLAIN)
    tl.store(partial, _sum_of_squares(_read(row + GRAD, start, lanes, exist, DTYPES[0], IS_PLAIN), exist))


@triton.jit
def _sum_of_squares(values: tl.tensor, exist: tl.tensor) -> tl.tensor:
    # In fp64, where no square of an fp32 number overflows.
    wide = tl.where(exist, values, 0.0).to(tl.float64)
    return tl.sum(wide * wide)


# ---- rules; `factor` points to the span's row of hyper-parameters, see `triton_kernels.factors_of` ----


@triton.jit
def _adam(
    master: tl.tensor, grad: tl.tensor, exp_avg: tl.tensor, exp_avg_sq: tl.tensor, factor: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    # 1 - beta1, beta2, 1 - beta2, sqrt(bias correction 2), eps, lr / bias correction 1, 1 - lr * decay, L2
    grad = _with_weight_decay(grad, master, tl.load(factor + 7))
    exp_avg, exp_avg_sq = _moments(exp_avg, exp_avg_sq, grad, factor)
    denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), tl.load(factor + 3)) + tl.load(factor + 4)
    master = master * tl.load(factor + 6) - tl.div_rn(tl.load(factor + 5) * exp_avg, denominator)
    return master, exp_avg, exp_avg_sq


@triton.jit
def _adagrad(master: tl.tensor, grad: tl.tensor, sums: tl.tensor, factor: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    # lr of this step, weight decay, eps
    grad = _with_weight_decay(grad, master, tl.load(factor + 1))
    sums = tl.fma(grad, grad, sums)
    return master - tl.div_rn(tl.load(factor) * grad, tl.sqrt_rn(sums) + tl.load(factor + 2)), sums


@triton.jit
def _lion(master: tl.tensor, grad: tl.tensor, exp_avg: tl.tensor, factor: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    # lr, 1 - lr * decay, beta1, 1 - beta1, beta2, 1 - beta2
    mixed = exp_avg * tl.load(factor + 2) + grad * tl.load(factor + 3)
    direction = tl.where(mixed > 0, 1.0, tl.where(mixed < 0, -1.0, 0.0))  # 0 for NaN, as in torch
    exp_avg = tl.fma(grad, tl.load(factor + 5), exp_avg * tl.load(factor + 4))
    return master * tl.load(factor + 1) - tl.load(factor) * direction, exp_avg


@triton.jit
def _sgd_with_momentum(
    master: tl.tensor, grad: tl.tensor, buffer: tl.tensor, factor: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    # lr, weight decay, momentum, 1 - dampening, is_first, is_nesterov
    grad = _with_weight_decay(grad, master, tl.load(factor + 1))
    momentum = tl.load(factor + 2)
    is_first = tl.load(factor + 4) != 0
    buffer = tl.where(is_first, grad, tl.fma(grad, tl.load(factor + 3), buffer * momentum))
    is_nesterov = tl.load(factor + 5) != 0
    step = tl.where(is_nesterov, tl.fma(buffer, momentum, grad), buffer)
    return tl.fma(step, -tl.load(factor), master), buffer


@triton.jit
def _with_weight_decay(grad: tl.tensor, master: tl.tensor, weight_decay: tl.tensor) -> tl.tensor:
    # Weights that are not finite must not reach the gradient where there is no decay: 0 * inf is NaN.
    return tl.where(weight_decay != 0, tl.fma(master, weight_decay, grad), grad)


@triton.jit
def _moments(
    exp_avg: tl.tensor, exp_avg_sq: tl.tensor, grad: tl.tensor, factor: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    weight = tl.load(factor)
    gap = grad - exp_avg
    # torch's lerp starts from the nearer end.
    exp_avg = tl.where(weight < 0.5, tl.fma(gap, weight, exp_avg), tl.fma(gap, weight - 1, grad))
    exp_avg_sq = tl.fma(tl.load(factor + 2) * grad, grad, exp_avg_sq * tl.load(factor + 1))
    return exp_avg, exp_avg_sq


@triton.jit
def _lamb_direction(master: tl.tensor, exp_avg: tl.tensor, exp_avg_sq: tl.tensor, factor: tl.tensor) -> tl.tensor:
    # 1 - beta1, beta2, 1 - beta2, bias corrections 1 and 2, eps inside the root, eps after it, weight decay, lr * ratio
    variance = tl.div_rn(exp_avg_sq, tl.load(factor + 4))
    root = tl.sqrt_rn(variance + tl.load(factor + 5)) + tl.load(factor + 6)
    return tl.fma(master, tl.load(factor + 7), tl.div_rn(tl.div_rn(exp_avg, tl.load(factor + 3)), root))


# ---- memory ----


@triton.jit
def _read(
    cell: tl.tensor,
    start: tl.tensor,
    lanes: tl.tensor,
    exist: tl.tensor,
    DTYPE: tl.constexpr,
    IS_PLAIN: tl.constexpr,
) -> tl.tensor:
    """Load elements as fp32 from the address in `cell`."""
    if DTYPE.is_bf16():
        bits = tl.load(_pointers(cell, start, lanes, tl.uint16, IS_PLAIN), mask=exist, other=0)
        values = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        values = tl.load(_pointers(cell, start, lanes, DTYPE, IS_PLAIN), mask=exist, other=0.0).to(tl.float32)
    return values


@triton.jit
def _bf16_bits(values: tl.tensor) -> tl.tensor:
    """Round fp32 to the nearest bf16, and to even; the bits of it as uint32."""
    # In integers, so that the interpreter rounds as a GPU does: its own conversion truncates, and loses subnormals.
    bits = values.to(tl.uint32, bitcast=True)
    return tl.where(values == values, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)


@triton.jit
def _write(
    cell: tl.tensor,
    start: tl.tensor,
    lanes: tl.tensor,
    exist: tl.tensor,
    values: tl.tensor,
    DTYPE: tl.constexpr,
    IS_PLAIN: tl.constexpr,
) -> None:
    """Store fp32 values, rounded to nearest even, at the address in `cell`."""
    if DTYPE.is_bf16():
        rounded = _bf16_bits(values).to(tl.uint16)
        tl.store(_pointers(cell, start, lanes, tl.uint16, IS_PLAIN), rounded, mask=exist)
    else:
        tl.store(_pointers(cell, start, lanes, DTYPE, IS_PLAIN), values.to(DTYPE), mask=exist)


@triton.jit
def _pointers(
    cell: tl.tensor, start: tl.tensor, lanes: tl.tensor, DTYPE: tl.constexpr, IS_PLAIN: tl.constexpr
) -> tl.tensor:
    base = tl.load(cell).to(tl.pointer_type(DTYPE)) + start
    if IS_PLAIN:
        base = tl.multiple_of(base, 16)
    return base + lanes
