"""How long a step of a mixture of experts takes, and what memory a rank has, with its experts over 1, 2 and 4 ranks.

    launch --num_gpus 4 benchmarks/expert_parallel.py [--rounds 9] [--width 256] [--tokens 256] [--engines PREFIX,...]
        [--output FILE]

All engines train one model of `MoE` layers on the same tokens in one job and step in turns, in another order each
round; the first step of a turn is not measured. DeepSpeed's layer, where it is installed, has the same experts and
capacity. Rank 0 writes a section of docs/benchmarks.md to FILE, or prints it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import NOT_INSTALLED, Section, argument_parser, is_installed, median, rounds_text, spread, table
from torch import Tensor, nn

import launcher
from launcher.comm.device import local_device

LAYERS, EXPERTS, TOP_K, CAPACITY = 4, 8, 2, 1.25
LR, BALANCE = 1e-4, 0.01
STEPS_A_TURN = 3
BASE = "launch, all experts on every rank"


class Mixture(nn.Module):
    """Layers of mixtures around residuals."""

    def __init__(self, layer: Callable[..., nn.Module], width: int, ep_size: int, **options: Any) -> None:
        """layer: the class of a layer."""
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.layers = nn.ModuleList()
        for _ in range(LAYERS):
            expert = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            given = {"capacity_factor": CAPACITY, "top2_2nd_expert_sampling": False, **options}
            self.layers.append(layer(width, expert, num_experts=EXPERTS, ep_size=ep_size, k=TOP_K, **given))

    def forward(self, x: Tensor) -> Tensor:
        """x: [tokens, width] -> the loss."""
        y, balance = self.first(x), x.new_zeros(())
        for layer in self.layers:
            output, loss, _ = layer(y)
            y, balance = y + output, balance + loss
        return (self.last(y) - x.roll(1, -1)).square().mean() + BALANCE * balance


@dataclass
class Turns:
    """What one engine took in each of its turns, a step, and what it holds."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # of all ranks
    grown_bytes: int = 0  # of a rank's memory, by the engine and its first step


def _config(tokens: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": tokens,
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000,
        "zero_optimization": {"stage": 1},
    }


def _ours(width: int, tokens: int, ep_size: int, **options: Any) -> Any:
    from launcher.moe import MoE

    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": LR}}}
    model = Mixture(MoE, width, ep_size, **options).to(DEVICE)
    return launcher.initialize(model=model, config=_config(tokens) | optimizer)[0]


def _deepspeeds(width: int, tokens: int, ep_size: int) -> Any:
    import deepspeed
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    model = Mixture(MoE, width, ep_size).to(DEVICE)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    optimizer = torch.optim.AdamW(groups, lr=LR, fused=True)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=_config(tokens))[0]


def contestants(width: int, tokens: int, prefixes: tuple[str, ...]) -> dict[str, Callable[[], Any]]:
    """Return what builds the engines whose names begin so, and the one that the others are compared with."""
    sizes = [size for size in (2, 4) if dist.get_world_size() % size == 0]
    found: dict[str, Callable[[], Any]] = {BASE: lambda: _ours(width, tokens, 1)}
    for size in sizes:
        found[f"launch, over {size}"] = lambda size=size: _ours(width, tokens, size)
        found[f"launch, over {size}, no drops"] = lambda size=size: _ours(width, tokens, size, drop_tokens=False)
    if is_installed("deepspeed"):
        for size in (1, *sizes):
            name = f"over {size}" if size > 1 else "all experts on every rank"
            found[f"DeepSpeed, {name}"] = lambda size=size: _deepspeeds(width, tokens, size)
    return {name: build for name, build in found.items() if name.startswith((BASE, *prefixes))}


def _resident_bytes() -> int:
    if DEVICE.type == "cuda":
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _step(engine: Any, x: Tensor) -> None:
    loss = engine(x)
    engine.backward(loss)
    engine.step()
    if isinstance(engine, launcher.Engine):
        engine.synchronize_parameters()


def measure(builders: dict[str, Callable[[], Any]], width: int, tokens: int, rounds: int) -> dict[str, Turns]:
    """Build every engine, and let all take their turns."""
    turns, engines = {name: Turns() for name in builders}, {}
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(tokens, width, generator=generator).to(DEVICE)
    for name, build in builders.items():
        before = _resident_bytes()
        engines[name] = build()
        _step(engines[name], x)
        turns[name].grown_bytes = _resident_bytes() - before
    orders = random.Random(0)  # the same on every rank
    for number in range(-1, rounds):  # one round of warming up
        for name in orders.sample(list(engines), len(engines)):
            _step(engines[name], x)
            dist.barrier()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            for _ in range(STEPS_A_TURN):
                _step(engines[name], x)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            cpu_s = torch.tensor(time.process_time() - start_cpu_s, device=DEVICE)
            dist.barrier()  # the step is over when the slowest rank has done it
            wall_s = time.perf_counter() - start_s
            dist.all_reduce(cpu_s)
            if number >= 0:
                turns[name].wall_s.append(wall_s / STEPS_A_TURN)
                turns[name].cpu_s.append(cpu_s.item() / STEPS_A_TURN)
    return turns


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__, rounds=9)
    parser.add_argument("--width", type=int, default=256, help="features of a token (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a rank (default %(default)s)")
    parser.add_argument("--engines", default="", help="beside the first one, by the beginnings of their names")
    options = parser.parse_args()
    page = Section("Expert parallelism", "torch", "deepspeed")
    builders = contestants(options.width, options.tokens, tuple(options.engines.split(",")))
    turns = measure(builders, options.width, options.tokens, options.rounds)
    base, rows = turns[BASE], []
    for name, own in turns.items():
        milliseconds = [1e3 * value for value in own.wall_s]
        ratios = [value / other for value, other in zip(own.wall_s, base.wall_s, strict=True)]
        figures = [f"{median(milliseconds):.1f} ms", spread(milliseconds), f"{median(ratios):.2f}"]
        rows.append([name, *figures, f"{median(own.cpu_s):.2f} s", f"{own.grown_bytes / 2**20:.0f} MiB"])
    if not is_installed("deepspeed"):
        rows.append(["DeepSpeed", NOT_INSTALLED])
    if dist.get_rank() == 0:
        per_layer = EXPERTS * sum(p.numel() for p in _expert_sizes(options.width))
        text = (
            f"{dist.get_world_size()} ranks on {DEVICE.type}, {dist.get_backend()}, fp32, ZeRO stage 1, {LAYERS} layers"
            f" of {EXPERTS} experts with {per_layer / 1e6:.1f} M parameters each,\n{options.tokens} tokens of"
            f" {options.width} features a rank, k = {TOP_K}, capacity factor {CAPACITY}. AdamW: ours by the engine's"
            " own kernel, DeepSpeed's by torch's fused one.\nMemory: by how much rank 0 grew when the engine was built"
            " and took its first step. CPU: seconds of all ranks a step.\n`over the first` is the median of the ratios"
            " to the first row within a round.\n\n"
        )
        header = ["engine", "step", "quartiles", "over the first", "CPU", "memory of a rank"]
        samples = rounds_text(
            options.rounds,
            f"{STEPS_A_TURN} steps each after one not measured, engines in another order each round in one job",
        )
        page.write(samples, text + table(header, rows), options.output)
    dist.destroy_process_group()


def _expert_sizes(width: int) -> list[Tensor]:
    with torch.device("meta"):
        return [*nn.Linear(width, 4 * width).parameters(), *nn.Linear(4 * width, width).parameters()]


launcher.init_distributed()
DEVICE = local_device()

if __name__ == "__main__":
    main()
