"""How fast the Triton AdamW moves memory, beside torch's fused and foreach AdamW: on a GPU.

    python benchmarks/gpu_kernels.py [--numel 268435456] [--spans 8] [--rounds 20] [--output FILE]

Every candidate reads a bf16 gradient and updates an fp32 master, fp32 states and a bf16 parameter. GB/s count what one
pass has to move, 28 bytes an element, so extra passes show as a lower rate. Candidates take turns. docs/benchmarks.md
has no such section: it has not run on a GPU yet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from common import Section, argument_parser, measure_in_turns, median, rounds_text, spread, table

from launcher.kernels.api import Adam, Span
from launcher.kernels.triton_kernels import load_triton_kernel, triton_problem

BYTES_AN_ELEMENT = 2 + 2 * 4 + 2 * 8 + 2
LR, WEIGHT_DECAY = 1e-4, 0.01
BASE = "torch fused"


def timed(step: Callable[[], None]) -> Callable[[], float]:
    """Return a function that takes a step and returns the device's seconds."""

    def run() -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

    return run


def triton_step(numel: int, num_spans: int) -> Callable[[], None]:
    """Build shards of `num_spans` groups and return their step."""
    kernel = load_triton_kernel()
    if kernel is None:
        sys.exit(f"gpu_kernels.py needs Triton. {triton_problem()}")
    master, first, second = (torch.zeros(numel, device="cuda") for _ in range(3))
    grad, param = (torch.ones(numel, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    taken = 0

    def step() -> None:
        nonlocal taken
        taken += 1
        rule = Adam(LR, 0.9, 0.999, 1e-8, WEIGHT_DECAY, taken)
        parts = zip(*(tensor.chunk(num_spans) for tensor in (master, grad, first, second, param)), strict=True)
        kernel.update([Span(rule, m, g, (s1, s2), p) for m, g, s1, s2, p in parts], grad_scale=0.5)

    return step


def torch_step(numel: int, num_spans: int, **kind: bool) -> Callable[[], None]:
    """Build the same for torch's own AdamW: the gradient widened and unscaled in front, the parameter copied after."""
    master, grad = torch.zeros(numel, device="cuda"), torch.ones(numel, dtype=torch.bfloat16, device="cuda")
    param, wide = grad.clone(), torch.empty_like(master)
    parts = list(master.chunk(num_spans))
    for part, gradient in zip(parts, wide.chunk(num_spans), strict=True):
        part.grad = gradient
    optimizer = torch.optim.AdamW(parts, lr=LR, weight_decay=WEIGHT_DECAY, **kind)

    def step() -> None:
        torch.mul(grad, 0.5, out=wide)
        optimizer.step()
        param.copy_(master)

    return step


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__, rounds=20)
    parser.add_argument("--numel", type=int, default=2**28)
    parser.add_argument("--spans", type=int, default=8)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_kernels.py measures GPU kernels: torch finds no GPU here")
    page = Section("Optimizer kernels on a GPU", "torch", "triton")
    samples = measure_in_turns(
        {
            BASE: timed(torch_step(args.numel, args.spans, fused=True)),
            "torch foreach": timed(torch_step(args.numel, args.spans, foreach=True)),
            "Triton": timed(triton_step(args.numel, args.spans)),
        },
        args.rounds,
    )
    base = median(samples[BASE])
    rows = [
        [
            name,
            f"{median(times) * 1e3:.2f}",
            spread([time_s * 1e3 for time_s in times]),
            f"{args.numel * BYTES_AN_ELEMENT / median(times) / 1e9:.0f}",
            f"{median(times) / base:.2f}",
        ]
        for name, times in samples.items()
    ]
    text = f"{torch.cuda.get_device_name()}, {args.numel:,} elements, AdamW.\n\n"
    text += table(["kernel", "ms", "quartiles", "GB/s", f"time over {BASE}"], rows)
    page.write(rounds_text(args.rounds) + "; ratios of medians", text, args.output)


if __name__ == "__main__":
    main()
