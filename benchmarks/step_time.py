"""How long an optimizer step takes through our engine, DDP, FSDP2 and, where it is installed, DeepSpeed.

    launch --num_gpus 2 benchmarks/step_time.py [--rounds 15] [--models mlp,gpt] [--output FILE]

All engines train copies of one model on the same batches in one job and step in turns. Rank 0 writes a section of
docs/benchmarks.md to FILE, or prints it.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import machine_line, median, spread, table
from torch import Tensor, nn
from torch.nn import functional as F

import launcher
from launcher.comm.groups import local_device

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from train_gpt import GPT, GPTConfig

LR, WEIGHT_DECAY = 1e-4, 0.01
STEPS_A_TURN = 3
STAGES = (0, 1, 2, 3)
BASE = "DDP"
Batch = tuple[Tensor, ...]


class MLP(nn.Module):
    """Eight square layers of 2048 and a mean-square loss: hardly any computing for many parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(8))
        self.head = nn.Linear(2048, 512)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [batch, 2048], y: [batch, 512] -> scalar."""
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.mse_loss(self.head(x), y)


def build_model(name: str) -> nn.Module:
    """Build one of the two models, the same on every rank."""
    torch.manual_seed(0)
    return MLP() if name == "mlp" else GPT(GPTConfig(num_layers=12, hidden_size=384, num_heads=12, context=256))


def make_batch(name: str, step: int) -> Batch:
    """Return this rank's batch of one step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    if name == "mlp":
        x, y = torch.randn(32, 2048, generator=generator), torch.randn(32, 512, generator=generator)
        return x.to(DEVICE), y.to(DEVICE)
    tokens = torch.randint(0, 256, (4, 257), generator=generator).to(DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


class TorchLoop:
    """A plain training loop around a wrapped model: DDP or FSDP2."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step(self, batch: Batch) -> Tensor:
        """Take one optimizer step."""
        loss: Tensor = self.model(*batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def settle(self) -> None:
        """Nothing is left on its way after a step."""


class EngineLoop:
    """A loop through an engine with DeepSpeed's interface: ours or DeepSpeed itself."""

    def __init__(self, initialize: Callable[..., Any], model: nn.Module, stage: int, batch_size: int) -> None:
        config = {
            "train_micro_batch_size_per_gpu": batch_size,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "steps_per_print": 1_000_000,
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
        }
        self.engine = initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def step(self, batch: Batch) -> Tensor:
        """Take one optimizer step."""
        loss: Tensor = self.engine(*batch)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def settle(self) -> None:
        """Wait for updated parameters that are still on their way, so that no other engine pays for them."""
        if isinstance(self.engine, launcher.Engine):
            self.engine.synchronize_parameters()


def _ddp(model: nn.Module) -> TorchLoop:
    ids = [DEVICE.index] if DEVICE.type == "cuda" else None
    return TorchLoop(nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True))


def _fsdp2(model: nn.Module) -> TorchLoop:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    return TorchLoop(fully_shard(model, mesh=mesh))


def contestants(name: str) -> dict[str, Any]:
    """Build every engine around a copy of one model."""
    model = build_model(name).to(DEVICE)
    batch_size = len(make_batch(name, 0)[0])
    engines: dict[str, Any] = {BASE: _ddp(copy.deepcopy(model)), "FSDP2": _fsdp2(copy.deepcopy(model))}
    for stage in STAGES:
        engines[f"launch stage {stage}"] = EngineLoop(launcher.initialize, copy.deepcopy(model), stage, batch_size)
    try:
        import deepspeed
    except ImportError:
        return engines
    for stage in STAGES:
        copied = copy.deepcopy(model)
        engines[f"DeepSpeed stage {stage}"] = EngineLoop(deepspeed.initialize, copied, stage, batch_size)
    return engines


def measure(name: str, rounds: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return seconds a step and the last loss of each engine."""
    engines = contestants(name)
    times: dict[str, list[float]] = {engine: [] for engine in engines}
    losses: dict[str, float] = {}
    for number in range(-2, rounds):  # two rounds of warming up
        batches = [make_batch(name, number * STEPS_A_TURN + i + 100) for i in range(STEPS_A_TURN)]
        for engine in engines if number % 2 else reversed(engines):
            loop = engines[engine]
            dist.barrier()
            start_s = time.perf_counter()
            for batch in batches:
                loss = loop.step(batch)
            loop.settle()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier()  # the step is over when the slowest rank has done it
            if number >= 0:
                times[engine].append((time.perf_counter() - start_s) / STEPS_A_TURN)
            losses[engine] = loss.item()
    return times, losses


def section(name: str, rounds: int) -> str:
    """Measure one model and return its part of the page."""
    times, losses = measure(name, rounds)
    num_params = sum(p.numel() for p in build_model(name).parameters())
    rows = []
    for engine, values in times.items():
        # Engines of one round met the same moment of the machine: the ratio is taken there.
        ratios = [value / base for value, base in zip(values, times[BASE], strict=True)]
        milliseconds = [1e3 * value for value in values]
        drift = abs(losses[engine] - losses[BASE]) / abs(losses[BASE])
        rows.append(
            [engine, f"{median(milliseconds):.1f} ms", spread(milliseconds), f"{median(ratios):.2f}", f"{drift:.1e}"]
        )
    header = ["engine", "step", "quartiles", f"over {BASE}", f"last loss, relative to {BASE}'s"]
    return f"### {name.upper()}, {num_params / 1e6:.1f} M parameters\n\n{table(header, rows)}\n\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", default="mlp,gpt")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    parts = [section(name, options.rounds) for name in options.models.split(",")]
    if dist.get_rank() == 0:
        threads = os.environ.get("OMP_NUM_THREADS", "?")
        setting = (
            f"{dist.get_world_size()} ranks on {DEVICE.type}, {dist.get_backend()}, fp32, OMP_NUM_THREADS={threads},"
            f" AdamW (fused), no clipping. Medians of {options.rounds} rounds of {STEPS_A_TURN} steps, engines in turns"
            " in one job;\n`launch --num_gpus 2 benchmarks/step_time.py`."
        )
        text = f"## Step times\n\n{machine_line('torch', 'deepspeed')}\n{setting}\n\n{''.join(parts)}"
        if options.output:
            options.output.write_text(text)
        else:
            print(text)
    dist.destroy_process_group()


launcher.init_distributed()
DEVICE = local_device()

if __name__ == "__main__":
    main()
