"""What the optimizers with one-bit communication send, how long their steps take and how well they train.

    launch --num_gpus 2 benchmarks/onebit.py [--width 1024] [--steps 20] [--training_steps 400] [--output FILE]

Bytes are those that collectives count on each rank, in warm-up and in compressed steps. A byte-level GPT is trained on
Python's own sources by each of them and by the optimizer it compresses. Rank 0 writes a section of docs/benchmarks.md.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Section, argument_parser, median, table
from torch import nn
from torch.nn import functional as F

import launcher
from launcher.comm import observe
from launcher.comm.groups import is_first_rank

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train_gpt import GPT, GPTConfig, evaluate, load_windows, mean_over_ranks

WARM_UP_STEPS = 4
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "OneBitAdam": {"freeze_step": WARM_UP_STEPS},
    "ZeroOneAdam": {"var_freeze_step": WARM_UP_STEPS, "local_step_scaler": 1, "local_step_clipper": 4},
    "OneBitLamb": {"freeze_step": WARM_UP_STEPS},
}
# The GPT: a quarter of the steps in front of the compression, as in the papers.
CONTEXT, LR, LR_LAMB, WARM_UP_PART = 128, 1e-3, 5e-3, 4
LAST_STEPS = 20  # whose losses are averaged


def measure(name: str, width: int, num_steps: int) -> tuple[list[int], list[float]]:
    """Return the bytes that this rank has sent, and the milliseconds, of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "steps_per_print": 0,
        "optimizer": {"type": name, "params": {"lr": 1e-4, **OPTIMIZERS[name]}},
    }
    engine, *_ = launcher.initialize(model=model, config=config)
    x = torch.randn(8, width, device=engine.device)
    sent_bytes, times_ms = [], []
    for _ in range(WARM_UP_STEPS + num_steps):
        begun_s, before = time.perf_counter(), observe.sent_bytes()
        engine.backward(F.mse_loss(engine(x), x))
        engine.step()
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
        times_ms.append((time.perf_counter() - begun_s) * 1e3)
        sent_bytes.append(observe.sent_bytes() - before)
    return sent_bytes, times_ms


def traffic_table(width: int, num_steps: int) -> str:
    """Return what each optimizer sends in a step, and how long the step takes."""
    rows = []
    for name in OPTIMIZERS:
        sent_bytes, times_ms = measure(name, width, num_steps)
        early, late = sent_bytes[WARM_UP_STEPS - 1], sum(sent_bytes[WARM_UP_STEPS:]) / num_steps
        steps_ms = [f"{median(part):.1f}" for part in (times_ms[1:WARM_UP_STEPS], times_ms[WARM_UP_STEPS:])]
        rows.append([name, f"{early:,}", f"{late:,.0f}", f"{early / late:.1f}", *steps_ms])
    return table(("optimizer", "warm-up: bytes sent a step", "then", "times less", "warm-up: ms a step", "then"), rows)


def contestants(num_steps: int) -> dict[str, dict[str, Any]]:
    """Return types and params of what trains the GPT."""
    freeze = num_steps // WARM_UP_PART
    zero_one = {"var_freeze_step": 2 * freeze, "local_step_scaler": freeze, "local_step_clipper": 2}
    return {
        "AdamW": {"lr": LR},
        "OneBitAdam": {"lr": LR, "freeze_step": freeze},
        "ZeroOneAdam": {"lr": LR, **zero_one},
        "Lamb": {"lr": LR_LAMB},
        "OneBitLamb": {"lr": LR_LAMB, "freeze_step": freeze},
    }


def train(name: str, params: dict[str, Any], num_steps: int) -> tuple[list[float], float, int]:
    """Train the GPT; return the loss of every step over all ranks, that of unseen text, and the bytes a rank sent."""
    torch.manual_seed(0)
    training, validation = load_windows(None, CONTEXT)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "steps_per_print": 0,
        "optimizer": {"type": name, "params": params},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": num_steps // 10, "warmup_type": "linear"}},
    }
    model = GPT(GPTConfig(num_layers=4, hidden_size=192, num_heads=6, context=CONTEXT))
    engine, _, loader, _ = launcher.initialize(model=model, training_data=training, config=config)
    losses = []
    batches, before = iter(loader), observe.sent_bytes()
    for _ in range(num_steps):
        tokens, targets = (tensor.to(engine.device) for tensor in next(batches))
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    sent_bytes = observe.sent_bytes() - before
    means = [mean_over_ranks(loss) for loss in losses]
    return means, evaluate(engine, validation, batch_size=64), sent_bytes


def training_table(num_steps: int) -> str:
    """Return how far each optimizer gets."""
    rows, freeze = [], num_steps // WARM_UP_PART
    for name, params in contestants(num_steps).items():
        losses, unseen, sent_bytes = train(name, params, num_steps)
        parts = [losses[max(0, freeze - LAST_STEPS) : freeze], losses[-LAST_STEPS:]]
        means = [f"{sum(part) / len(part):.3f}" for part in parts]
        rows.append([name, f"{losses[0]:.3f}", *means, f"{unseen:.3f}", f"{sent_bytes / 2**20:,.0f} MiB"])
    header = ("optimizer", "loss at first", f"before step {freeze}", f"at step {num_steps}", "of unseen text", "sent")
    return table(header, rows)


def main() -> None:
    """Measure each optimizer after the other."""
    parser = argument_parser(__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--training_steps", type=int, default=400)
    options = parser.parse_args()
    page = Section("One bit on the wire", "torch")
    launcher.init_distributed()
    traffic, training = traffic_table(options.width, options.steps), training_table(options.training_steps)
    if is_first_rank():
        text = (
            f"{dist.get_world_size()} ranks, fp32, stage 0.\n\n"
            f"What a rank sends, {8 * options.width * (options.width + 1) / 1e6:.1f} M parameters:\n\n{traffic}\n\n"
            f"A byte-level GPT of 1.9 M parameters on Python's own sources, {options.training_steps} steps of 2,048"
            f" bytes, the last three quarters compressed:\n\n{training}\n"
        )
        samples = f"Times: medians of {WARM_UP_STEPS - 1} warm-up and {options.steps} compressed steps; losses: one run"
        page.write(samples, text, options.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
