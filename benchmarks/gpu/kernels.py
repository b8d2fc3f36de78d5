"""The optimizer kernels of a device against the reference, and the part of the copy bandwidth that they reach.

python -m gpu.kernels parity [--quick]
python -m gpu.kernels rates  [--numel 268435456] [--rounds 20] [--sweep]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from common import measure_in_turns, median
from gpu.steps import attempt, commands, row
from harness.train.spans import RULES, check_update, random_shard
from torch import Tensor

from launcher.kernels.api import Adam, DeviceScale, Kernel, Span
from launcher.kernels.check import SpanTypes
from launcher.kernels.program_shape import ProgramShape
from launcher.kernels.reference import ReferenceKernel
from launcher.kernels.select import describe_kernel, kernel_for
from launcher.kernels.triton_kernels import TritonKernel

F32, B16, F16 = torch.float32, torch.bfloat16, torch.float16
ADAMW = Adam(1e-4, 0.9, 0.999, 1e-8, 0.01, step=1)
SPANS = 24
AHEAD_CYCLES = 2_000_000  # a millisecond in which the host queues a call: the device's time has no gap for it


def parity(options: argparse.Namespace, kernel: Kernel) -> None:
    """Compare every rule on shards of random types, lengths, gaps and addresses with the reference, on the CPU."""
    blocks = [(128, 12)] if options.quick else [(1024, 120), (1_000_003, 6)]
    for kind in RULES:
        for block_numel, num_shards in blocks:
            wrong: Counter[str] = Counter()
            for seed in range(num_shards):
                shard = random_shard(kind, seed, block_numel)
                try:
                    check_update(kernel, shard, options.device, grad_scale=(1.0, 0.25, 1 / 3)[seed % 3])
                except Exception as error:  # noqa: BLE001  # the other seeds are run
                    wrong[f"seed {seed}: {type(error).__name__}: {str(error)[:200]}"] += 1
            first = next(iter(wrong), "")
            lengths = f"up to {2 * block_numel} and a tail"
            row(f"{kind.__name__}, {lengths}", ok=not wrong, shards=num_shards, wrong=len(wrong), detail=first)
    for dtype in (F32, B16, F16):
        attempt(f"sum of squares, {dtype}", partial(_norm, kernel, dtype, options))
    attempt("a skipped step", partial(_skipped, kernel, options.device))


def _norm(kernel: Kernel, dtype: torch.dtype, options: argparse.Namespace) -> None:
    lengths = [1, 7, 1031, 65_536] + ([] if options.quick else [1_000_003])
    grads = [torch.randn(numel).to(dtype) for numel in lengths]
    there = [grad.to(options.device) for grad in grads]
    found, again = (kernel.sum_of_squares(there).item() for _ in range(2))
    apart = abs(found / ReferenceKernel().sum_of_squares(grads).item() - 1)
    there[-1][-1] = float("inf")
    is_inf = kernel.sum_of_squares(there).item() == float("inf")
    row(f"sum of squares, {dtype}", ok=apart < 1e-12 and found == again and is_inf, apart=apart)


def _skipped(kernel: Kernel, device: str) -> None:
    shard = random_shard(Adam, 3, 1024)
    taken = shard.to(device)
    kernel.update(taken.spans(), DeviceScale(torch.tensor(0.5, device=device), torch.ones((), device=device)))
    pairs = zip((taken.master, *taken.states), (shard.master, *shard.states), strict=True)
    row("a skipped step writes nothing", ok=all(torch.equal(a.cpu(), b) for a, b in pairs))


# ---- Rates ----


@dataclass(frozen=True)
class Kinds:
    """Types of what a step reads and writes."""

    master: torch.dtype
    grad: torch.dtype
    state: torch.dtype
    param: torch.dtype | None = None

    @property
    def num_bytes(self) -> int:
        """Of one element in one pass: the gradient is read, the parameter written, the others both."""
        param = 0 if self.param is None else self.param.itemsize
        return 2 * self.master.itemsize + self.grad.itemsize + 4 * self.state.itemsize + param


KINDS = {
    "fp32": Kinds(F32, F32, F32),
    "bf16, fp32 sums": Kinds(F32, F32, F32, B16),
    "bf16, bf16 sums": Kinds(F32, B16, F32, B16),
    "fp16, fp16 sums": Kinds(F32, F16, F32, F16),
    "bf16 alone": Kinds(B16, B16, B16),
}
BF16 = "bf16, fp32 sums"


def timed(call: Callable[[], object], device: str) -> Callable[[], float]:
    """Return a function that calls, and returns the device's seconds."""

    def on_gpu() -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD_CYCLES)
        start.record()
        call()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3

    def on_cpu() -> float:
        start_s = time.perf_counter()
        call()
        return time.perf_counter() - start_s

    return on_gpu if device == "cuda" else on_cpu


def median_s(call: Callable[[], object], device: str, rounds: int) -> float:
    """Return the median of the device's seconds of a call, after one that is not measured."""
    return median(measure_in_turns({"": timed(call, device)}, rounds)[""])


def copy_rate(num_bytes: int, device: str, rounds: int) -> float:
    """Return the bytes that a copy in the device's memory reads and writes in a second."""
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * num_bytes / median_s(lambda: target.copy_(source), device, rounds)


def adamw_step(kernel: Kernel, kinds: Kinds, numel: int, device: str, num_spans: int = SPANS) -> Callable[[], None]:
    """Return a step of the kernel as the engine takes it behind the host: by a scale that only the device knows."""
    master, grad = torch.randn(numel, device=device).to(kinds.master), torch.randn(numel, device=device).to(kinds.grad)
    states = [torch.rand(numel, device=device).to(kinds.state) for _ in range(2)]
    parts = list(zip(*(tensor.chunk(num_spans) for tensor in (master, grad, *states)), strict=True))
    params = [None] * len(parts) if kinds.param is None else master.to(kinds.param).chunk(num_spans)
    scale = DeviceScale(torch.ones((), device=device), torch.zeros((), device=device))
    numbers = itertools.count(1)

    def step() -> None:
        rule = replace(ADAMW, step=next(numbers))
        spans = [Span(rule, m, g, (s, t), param) for (m, g, s, t), param in zip(parts, params, strict=True)]
        kernel.update(spans, scale)

    return step


def torch_step(numel: int, device: str, *, is_scaled: bool) -> Callable[[], object]:
    """Return a step of torch's fused AdamW in fp32. is_scaled: it unscales the gradients, and so writes them, too."""
    parts = list(torch.randn(numel, device=device).chunk(SPANS))
    for part in parts:
        part.grad = torch.randn_like(part)
    optimizer = torch.optim.AdamW(parts, lr=1e-4, fused=True)
    if is_scaled:
        vars(optimizer).update(grad_scale=torch.ones((), device=device), found_inf=torch.zeros((), device=device))
    return optimizer.step


def rates(options: argparse.Namespace, kernel: Kernel) -> None:
    """Measure AdamW and the norm beside a copy of the device's memory, and beside torch's fused AdamW."""
    numel, device = options.numel, options.device
    copied = copy_rate(4 * numel, device, options.rounds)
    row("a copy in the device's memory", GBps=copied / 1e9)

    def write(case: str, call: Callable[[], object], num_bytes: int) -> None:
        seconds = median_s(call, device, options.rounds)
        rate = num_bytes / seconds
        row(case, ms=seconds * 1e3, GBps=rate / 1e9, of_copy=rate / copied)

    for name, kinds in KINDS.items():
        for num_spans in (SPANS, 300) if name == BF16 else (SPANS,):
            step = adamw_step(kernel, kinds, numel, device, num_spans)
            write(f"{kernel.name}, AdamW, {name}, {num_spans} spans", step, numel * kinds.num_bytes)
    for dtype in (F32, B16):
        grads: list[Tensor] = list(torch.randn(numel, device=device).to(dtype).chunk(SPANS))
        norm = partial(kernel.sum_of_squares, grads)
        write(f"{kernel.name}, sum of squares, {dtype}", norm, numel * dtype.itemsize)
    for is_scaled in (False, True):
        step_of_torch = torch_step(numel, device, is_scaled=is_scaled)
        write(f"torch's fused AdamW, fp32{', scaled' * is_scaled}", step_of_torch, numel * KINDS["fp32"].num_bytes)
    if options.sweep:
        for block, warps in itertools.product((512, 1024, 2048, 4096), (2, 4, 8)):
            name = f"Triton, {block} elements a program, {warps} warps"
            step = adamw_step(TritonKernel(ProgramShape(block, warps)), KINDS[BF16], numel, device)
            attempt(name, partial(write, name, step, numel * KINDS[BF16].num_bytes))
        own = TritonKernel()
        own.choose_shape(ADAMW, 2, SpanTypes(param=B16), torch.device(device))
        name = "Triton, the shape that an engine chooses"
        write(name, adamw_step(own, KINDS[BF16], numel, device), numel * KINDS[BF16].num_bytes)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    found, of = commands(__doc__, (parity, rates))
    of[parity].add_argument("--quick", action="store_true", help="few and small shards")
    of[rates].add_argument("--numel", type=int, default=2**28)
    of[rates].add_argument("--rounds", type=int, default=20)
    of[rates].add_argument("--sweep", action="store_true", help="other shapes of Triton's programs, too")
    return found


def main() -> None:
    """Find the kernel and run the command."""
    options = parser().parse_args()
    kernel = kernel_for(options.device)
    if kernel is None:
        row("no kernel", ok=False, detail=describe_kernel(options.device))
        return
    options.call(options, kernel)


if __name__ == "__main__":
    main()
