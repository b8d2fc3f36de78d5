"""How long a step of a pipeline of two stages takes, and how much of it each rank is idle, beside the theory.

    launch --num_gpus 2 benchmarks/pipeline.py [--rounds 8] [--micro-batches 4,8] [--output FILE]

Our schedules, torch's own (`torch.distributed.pipelining`) and, where it is installed, DeepSpeed's PipelineModule train
copies of one model of equal blocks on the same micro-batches in one job, and step in turns, in another order each
round. The first step of a turn is not measured. Rank 0 writes a section of docs/benchmarks.md to FILE, or prints it.
"""

from __future__ import annotations

import copy
import functools
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from common import NOT_INSTALLED, Section, argument_parser, is_installed, median, rounds_text, spread, table
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional as F

import launcher
from launcher.comm.device import local_device
from launcher.sharding.pipeline import PipelinePlan

NUM_BLOCKS, SAMPLES, LENGTH = 8, 4, 128
LR = 1e-4
STEPS_A_TURN = 2
BASE = "torch 1F1B"
Pair = tuple[Tensor, Tensor]
# Name -> keys of our config, and torch's class.
SCHEDULES: dict[str, tuple[dict[str, Any], Any]] = {
    "GPipe": ({"schedule": "gpipe"}, ScheduleGPipe),
    "1F1B": ({"schedule": "1f1b"}, Schedule1F1B),
    "interleaved 1F1B": ({"schedule": "interleaved_1f1b", "virtual_stages": 2}, ScheduleInterleaved1F1B),
    "zero bubble": ({"schedule": "zero_bubble"}, ScheduleInterleavedZeroBubble),
    "zero bubble, V": ({"schedule": "zero_bubble_v", "virtual_stages": 2}, ScheduleZBVZeroBubble),
}


class Block(nn.Module):
    """A norm and a feed-forward part with a residual connection: all blocks take the same time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: [samples, length, width] -> the same."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def make_batch(step: int, count: int, width: int) -> list[Pair]:
    """Return the micro-batches of a step, the same on all ranks."""
    generator = torch.Generator().manual_seed(step)
    shape = (SAMPLES, LENGTH, width)
    return [
        (torch.randn(shape, generator=generator).to(DEVICE), torch.randn(shape, generator=generator).to(DEVICE))
        for _ in range(count)
    ]


class OwnPipeline:
    """Our engine around a PipelineModule."""

    def __init__(self, blocks: list[nn.Module], count: int, section: dict[str, Any]) -> None:
        self.engine = _initialized(launcher.initialize, launcher.PipelineModule, blocks, count, pipeline=section)
        self.idle: list[float] = []

    def step(self, batch: list[Pair]) -> Tensor:
        """Take one optimizer step."""
        loss: Tensor = self.engine.train_batch(iter(batch))
        self.idle.append(self.engine.idle_fraction)
        return loss


class DeepSpeedPipeline:
    """DeepSpeed's engine around its PipelineModule."""

    def __init__(self, blocks: list[nn.Module], count: int) -> None:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.init_distributed()
        self.engine = _initialized(deepspeed.initialize, PipelineModule, blocks, count, torch_adam=True, fused=True)

    def step(self, batch: list[Pair]) -> Tensor:
        """Take one optimizer step."""
        loss: Tensor = self.engine.train_batch(iter(batch))
        return loss


def _initialized(
    initialize: Callable[..., Any],
    module_class: Any,
    blocks: list[nn.Module],
    count: int,
    pipeline: dict[str, Any] | None = None,
    **optimizer: Any,
) -> Any:
    model = module_class(layers=blocks, num_stages=2, loss_fn=F.mse_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": count,
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01, **optimizer}},
        **({} if pipeline is None else {"pipeline": pipeline}),
    }
    trained = [param for param in model.parameters() if param.requires_grad]
    return initialize(model=model, model_parameters=trained, config=config)[0]


class TorchPipeline:
    """A plain loop around a schedule of torch."""

    def __init__(self, blocks: list[nn.Module], count: int, name: str) -> None:
        section, kind = SCHEDULES[name]
        plan = PipelinePlan(2, section.get("virtual_stages", 1), section["schedule"], count)
        per_stage = NUM_BLOCKS // plan.num_stages
        stages = [
            PipelineStage(
                nn.Sequential(*blocks[index * per_stage : (index + 1) * per_stage]).to(DEVICE),
                index,
                plan.num_stages,
                DEVICE,
            )
            for index in plan.stages_of(dist.get_rank())
        ]
        is_single = issubclass(kind, ScheduleGPipe | Schedule1F1B)
        self.schedule = kind(stages[0] if is_single else stages, count, loss_fn=F.mse_loss)
        self.has_first, self.has_last = (plan.rank_of(stage) == dist.get_rank() for stage in (0, plan.num_stages - 1))
        params = [param for stage in stages for param in stage.submod.parameters()]
        self.optimizer = torch.optim.AdamW(params, lr=LR, weight_decay=0.01, fused=True)

    def step(self, batch: list[Pair]) -> Tensor:
        """Take one optimizer step; return the mean loss on the rank of the last stage."""
        losses: list[Tensor] = []
        inputs = (torch.cat([x for x, _ in batch]),) if self.has_first else ()
        more = {"target": torch.cat([y for _, y in batch]), "losses": losses} if self.has_last else {}
        self.schedule.step(*inputs, **more)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else torch.zeros((), device=DEVICE)


def contestants(count: int, width: int, prefixes: tuple[str, ...]) -> dict[str, Any]:
    """Build the engines whose names begin so for so many micro-batches, each around a copy of one model."""
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(NUM_BLOCKS)]
    builders: dict[str, Callable[[list[nn.Module]], Any]] = {}
    for name, (section, _) in SCHEDULES.items():
        builders[f"launch {name}"] = functools.partial(OwnPipeline, count=count, section=section)
        builders[f"torch {name}"] = functools.partial(TorchPipeline, count=count, name=name)
    if is_installed("deepspeed"):
        builders["DeepSpeed (1F1B)"] = functools.partial(DeepSpeedPipeline, count=count)
    return {
        name: build(copy.deepcopy(blocks)) for name, build in builders.items() if name.startswith((BASE, *prefixes))
    }


@dataclass
class Turns:
    """What one engine took in each of its turns, a step."""

    wall_s: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)  # of a step, the mean of both ranks
    loss: float = math.nan


def measure(engines: dict[str, Any], count: int, width: int, rounds: int) -> dict[str, Turns]:
    """Let every engine take its turns on the same micro-batches."""
    turns = {name: Turns() for name in engines}
    orders = random.Random(0)  # the same on every rank
    for number in range(-1, rounds):  # one round of warming up
        first, *batches = (
            make_batch(number * (STEPS_A_TURN + 1) + i + 100, count, width) for i in range(STEPS_A_TURN + 1)
        )
        for name in orders.sample(list(engines), len(engines)):
            loop, own = engines[name], turns[name]
            loop.step(first)
            dist.barrier()
            start_s = time.perf_counter()
            losses = [loop.step(batch) for batch in batches]
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            wall_s = (time.perf_counter() - start_s) / STEPS_A_TURN
            loss = losses[-1].detach().float().reshape(1).to(DEVICE)
            dist.all_reduce(loss, dist.ReduceOp.MAX)
            own.loss = loss.item()
            if number >= 0:
                own.wall_s.append(wall_s)
                own.idle += _mean_idle(loop)
    return turns


def _mean_idle(loop: Any) -> list[float]:
    if not isinstance(loop, OwnPipeline):
        return []
    idle = torch.tensor(loop.idle[-STEPS_A_TURN:], device=DEVICE)
    dist.all_reduce(idle)
    return (idle / dist.get_world_size()).tolist()


def rows_of(turns: dict[str, Turns], count: int) -> Iterator[list[str]]:
    """Yield a row of the table for each engine."""
    base = turns[BASE]
    for name, own in turns.items():
        ratios = [value / other for value, other in zip(own.wall_s, base.wall_s, strict=True)]
        milliseconds = [1e3 * value for value in own.wall_s]
        section = SCHEDULES.get(name.removeprefix("launch "), ({}, None))[0]
        plan = PipelinePlan(2, section.get("virtual_stages", 1), section.get("schedule", "1f1b"), count)
        yield [
            name,
            f"{median(milliseconds):.0f} ms",
            spread(milliseconds),
            f"{median(ratios):.2f}",
            f"{median(own.idle):.1%}" if own.idle else "",
            f"{plan.idle_fraction:.1%}" if own.idle else "",
            f"{abs(own.loss - base.loss) / abs(base.loss):.0e}",
        ]
    if not is_installed("deepspeed"):
        yield ["DeepSpeed (1F1B)", NOT_INSTALLED]


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__, rounds=8)
    parser.add_argument("--micro-batches", default="4,8", help="of a step; default: %(default)s")
    parser.add_argument("--width", type=int, default=256, help="of the blocks; default: %(default)s")
    parser.add_argument(
        "--engines", default="", help="beside torch's 1F1B, by the beginnings of their names; default: all"
    )
    options = parser.parse_args()
    title = f"Pipeline: two stages of width {options.width}, and how much of a step is idle"
    page = Section(title, "torch", "deepspeed")
    header = ["engine", "step", "quartiles", f"over {BASE}", "idle", "in theory", f"last loss against {BASE}'s"]
    parts = []
    for count in map(int, options.micro_batches.split(",")):
        turns = measure(
            contestants(count, options.width, tuple(options.engines.split(","))), count, options.width, options.rounds
        )
        parts.append(f"### {count} micro-batches\n\n{table(header, list(rows_of(turns, count)))}\n\n")
    if dist.get_rank() == 0:
        text = (
            f"2 ranks on {DEVICE.type}, {dist.get_backend()}, fp32: {NUM_BLOCKS} equal blocks of width {options.width},"
            f" micro-batches of {SAMPLES} × {LENGTH} tokens.\nidle: the part of a step, without the optimizer, in which"
            " a rank does not compute, the mean of both ranks; transfers are in it.\nin theory: where forward, backward"
            " of inputs and backward of weights take the same time and transfers none.\nAdamW: ours by the engine's own"
            f" kernel, others' by torch's fused one. `over {BASE}` is the median of the ratios within a round.\n\n"
        )
        samples = rounds_text(
            options.rounds,
            f"{STEPS_A_TURN} steps each after one not measured, engines in another order each round in one job",
        )
        page.write(samples, text + "".join(parts), options.output)
    dist.destroy_process_group()


launcher.init_distributed()
DEVICE = local_device()

if __name__ == "__main__":
    main()
