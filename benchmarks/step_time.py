"""How long an optimizer step takes through our engine, DDP, FSDP2 and, where it is installed, DeepSpeed.

    launch --num_gpus 2 benchmarks/step_time.py [--rounds 15] [--models mlp,gpt,gpt100m] [--engines PREFIX,...]
        [--output FILE]

All engines train copies of one model on the same batches in one job and step in turns, in another order each round; the
first step of a turn is not measured. Rank 0 writes a section of
docs/benchmarks.md to FILE, or prints it. DeepSpeed's optimizer is torch's fused AdamW, as DDP's and FSDP2's are.
"""

from __future__ import annotations

import copy
import functools
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import NOT_INSTALLED, Section, argument_parser, is_installed, median, rounds_text, spread, table
from torch import Tensor, nn
from torch.nn import functional as F

import launcher
from launcher.comm.device import local_device

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
    """Build one of the models, the same on every rank; `tiny` only shows that this script works."""
    torch.manual_seed(0)
    if name == "tiny":
        return GPT(GPTConfig(num_layers=2, hidden_size=32, num_heads=2, context=256))
    if name == "mlp":
        return MLP()
    if name == "gpt":
        return GPT(GPTConfig(num_layers=12, hidden_size=384, num_heads=12, context=256))
    return GPT(GPTConfig(num_layers=14, hidden_size=768, num_heads=12, context=256))


def make_batch(name: str, step: int) -> Batch:
    """Return this rank's batch of one step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    if name == "mlp":
        x, y = torch.randn(32, 2048, generator=generator), torch.randn(32, 512, generator=generator)
        return x.to(DEVICE), y.to(DEVICE)
    samples = 4 if name == "gpt" else 1
    tokens = torch.randint(0, 256, (samples, 257), generator=generator).to(DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


class TorchLoop:
    """A plain training loop around a wrapped model: DDP or FSDP2."""

    def __init__(self, model: nn.Module, max_norm: float = 0.0) -> None:
        """max_norm: to clip gradients to; 0: none are."""
        self.model, self.max_norm = model, max_norm
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step(self, batch: Batch) -> Tensor:
        """Take one optimizer step."""
        loss: Tensor = self.model(*batch)
        loss.backward()
        if self.max_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def settle(self) -> None:
        """Nothing is left on its way after a step."""


class EngineLoop:
    """A loop through an engine with DeepSpeed's interface: ours or DeepSpeed itself."""

    def __init__(
        self,
        initialize: Callable[..., Any],
        model: nn.Module,
        batch_size: int,
        zero: dict[str, Any],
        settings: dict[str, Any] | None = None,
    ) -> None:
        """settings: further keys of the config."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": batch_size,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 0.0,
            "steps_per_print": 1_000_000,
            "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
            "zero_optimization": zero,
            **(settings or {}),
        }
        is_torchs = initialize is not launcher.initialize and "offload_optimizer" not in zero
        if is_torchs:  # DeepSpeed's own fused Adam is for GPUs; without `fused`, torch's would be a loop on a CPU
            config["optimizer"]["params"] |= {"torch_adam": True, "fused": True}
        self.engine = initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        if is_torchs and not all(group["fused"] for group in self.engine.basic_optimizer.param_groups):
            raise RuntimeError("DeepSpeed's AdamW is not torch's fused one: the comparison would be unfair")

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


def ddp(model: nn.Module, max_norm: float = 0.0) -> TorchLoop:
    """Return a loop around DDP, which computes in the model's type."""
    ids = [DEVICE.index] if DEVICE.type == "cuda" else None
    return TorchLoop(nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True), max_norm)


def _zero_redundancy(model: nn.Module) -> TorchLoop:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    loop = ddp(model)
    loop.optimizer = ZeroRedundancyOptimizer(
        loop.model.parameters(), torch.optim.AdamW, lr=LR, weight_decay=WEIGHT_DECAY, fused=True
    )
    return loop


def fsdp2(
    model: nn.Module, *, reshard_after_forward: bool = True, dtype: torch.dtype | None = None, max_norm: float = 0.0
) -> TorchLoop:
    """Return a loop around FSDP2 by block. dtype: to compute in, with reductions in fp32; None: the model's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(DEVICE.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(dtype, None if dtype is None else torch.float32)
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    return TorchLoop(fully_shard(model, mesh=mesh, mp_policy=policy), max_norm)


def contestants(name: str, prefixes: tuple[str, ...]) -> dict[str, Any]:
    """Build the engines whose names begin so, each around a copy of one model; of the large one those that fit."""
    model = build_model(name).to(DEVICE)
    batch_size = len(make_batch(name, 0)[0])
    is_large = name == "gpt100m"

    def engine(initialize: Callable[..., Any], stage: int, **zero: Any) -> Callable[[nn.Module], EngineLoop]:
        return lambda model: EngineLoop(initialize, model, batch_size, {"stage": stage, **zero})

    builders: dict[str, Callable[[nn.Module], Any]] = {BASE: ddp, "FSDP2": fsdp2}
    if not is_large:
        builders["DDP + ZeroRedundancyOptimizer"] = _zero_redundancy
        builders["FSDP2, no reshard"] = functools.partial(fsdp2, reshard_after_forward=False)
    for stage in (1, 3) if is_large else STAGES:
        builders[f"launch stage {stage}"] = engine(launcher.initialize, stage)
    builders["launch stage 3, sharded after forward"] = engine(launcher.initialize, 3, stage3_max_reuse_distance=0)
    if is_installed("deepspeed") and any("DeepSpeed".startswith(prefix.split(" ")[0]) for prefix in prefixes):
        import deepspeed

        for stage in (3,) if is_large else STAGES:
            builders[f"DeepSpeed stage {stage}"] = engine(deepspeed.initialize, stage)
    return {
        engine: build(copy.deepcopy(model))
        for engine, build in builders.items()
        if engine.startswith((BASE, *prefixes))
    }


@dataclass
class Turns:
    """What one engine took in each of its turns, a step."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # of both ranks, all threads
    sent_bytes: list[float] = field(default_factory=list)  # over the loopback interface, a rank
    loss: float = math.nan


def measure(engines: dict[str, Any], name: str, rounds: int) -> dict[str, Turns]:
    """Let every engine take its turns on batches of the model `name`."""
    turns = {engine: Turns() for engine in engines}
    orders = random.Random(0)  # the same on every rank
    for number in range(-1, rounds):  # one round of warming up
        first, *batches = (make_batch(name, number * (STEPS_A_TURN + 1) + i + 100) for i in range(STEPS_A_TURN + 1))
        for engine in orders.sample(list(engines), len(engines)):
            loop = engines[engine]
            loop.step(
                first
            )  # brings the engine's memory back into caches and page tables, as its last turn was long ago
            loop.settle()
            dist.barrier()
            start_s, start_cpu_s, start_bytes = time.perf_counter(), time.process_time(), _loopback_bytes()
            for batch in batches:
                loss = loop.step(batch)
            loop.settle()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            cpu_s = torch.tensor(time.process_time() - start_cpu_s)
            dist.barrier()  # the step is over when the slowest rank has done it
            wall_s, num_bytes = time.perf_counter() - start_s, _loopback_bytes() - start_bytes
            cpu_s = cpu_s.to(DEVICE)
            dist.all_reduce(cpu_s)
            if number >= 0:
                turns[engine].wall_s.append(wall_s / STEPS_A_TURN)
                turns[engine].cpu_s.append(cpu_s.item() / STEPS_A_TURN)
                turns[engine].sent_bytes.append(num_bytes / STEPS_A_TURN / dist.get_world_size())
            turns[engine].loss = loss.item()
    return turns


def _loopback_bytes() -> int:
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def section(name: str, rounds: int, prefixes: tuple[str, ...]) -> str:
    """Measure one model and return its part of the page."""
    turns = measure(contestants(name, prefixes), name, rounds)
    num_params = sum(p.numel() for p in build_model(name).parameters())
    base = turns[BASE]
    rows = []
    for engine, own in turns.items():
        # Engines of one round met the same moment of the machine: the ratio is taken there.
        ratios = [value / other for value, other in zip(own.wall_s, base.wall_s, strict=True)]
        milliseconds = [1e3 * value for value in own.wall_s]
        rows.append(
            [
                engine,
                f"{median(milliseconds):.1f} ms",
                spread(milliseconds),
                f"{median(ratios):.2f}",
                f"{median(own.cpu_s):.2f} s",
                f"{median(own.sent_bytes) / (4 * num_params):.2f} Ψ",
                f"{abs(own.loss - base.loss) / abs(base.loss):.1e}",
            ]
        )
    if not is_installed("deepspeed"):
        rows.append(["DeepSpeed", NOT_INSTALLED])
    header = ["engine", "step", "quartiles", f"over {BASE}", "CPU", "sent by a rank", f"last loss against {BASE}'s"]
    return f"### {name.upper()}, {num_params / 1e6:.1f} M parameters\n\n{table(header, rows)}\n\n"


def setting() -> str:
    """Return what all engines have in common."""
    return f"{dist.get_world_size()} ranks on {DEVICE.type}, {dist.get_backend()}, fp32, no clipping"


def main() -> None:
    """Measure and write."""
    parser = argument_parser(__doc__, rounds=15)
    parser.add_argument("--models", default="mlp,gpt,gpt100m", help="default: %(default)s")
    parser.add_argument(
        "--engines", default="", help="engines beside DDP, by the beginnings of their names; default: all"
    )
    options = parser.parse_args()
    names = options.models.split(",")
    page = Section(f"Step times: {', '.join(name.upper() for name in names)}", "torch", "deepspeed")
    parts = [section(name, options.rounds, tuple(options.engines.split(","))) for name in names]
    if dist.get_rank() == 0:
        text = (
            f"{setting()}. AdamW: ours by the engine's own kernel; DDP, FSDP2, ZeroRedundancyOptimizer and DeepSpeed"
            " by torch's fused one\n(checked in DeepSpeed's live engine). CPU: seconds of both ranks a step. Ψ: the"
            f" bytes of the parameters.\n`over {BASE}` is the median of the ratios within a round.\n\n"
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
