"""What the optimizers with one-bit communication send, and how long their steps take, beside AdamW.

    launch --num_gpus 2 benchmarks/onebit.py [--width 1024] [--steps 20]

Bytes are those that collectives count on each rank, in warm-up and in compressed steps. Rank 0 prints a table.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from common import median, table
from torch import nn
from torch.nn import functional as F

import launcher
from launcher.comm import observe
from launcher.comm.groups import data_parallel_group

WARM_UP_STEPS = 4
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "OneBitAdam": {"freeze_step": WARM_UP_STEPS},
    "ZeroOneAdam": {"var_freeze_step": WARM_UP_STEPS, "local_step_scaler": 1, "local_step_clipper": 4},
    "OneBitLamb": {"freeze_step": WARM_UP_STEPS},
}


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


def main() -> None:
    """Measure each optimizer after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    launcher.init_distributed()
    rows = []
    for name in OPTIMIZERS:
        sent_bytes, times_ms = measure(name, args.width, args.steps)
        early, late = sent_bytes[WARM_UP_STEPS - 1], sum(sent_bytes[WARM_UP_STEPS:]) / args.steps
        steps_ms = [f"{median(part):.1f}" for part in (times_ms[1:WARM_UP_STEPS], times_ms[WARM_UP_STEPS:])]
        rows.append([name, f"{early:,}", f"{late:,.0f}", f"{early / late:.1f}", *steps_ms])
    if data_parallel_group().rank == 0:
        header = ("optimizer", "warm-up: bytes sent a step", "then", "times less", "warm-up: ms a step", "then")
        print(table(header, rows))


if __name__ == "__main__":
    main()
