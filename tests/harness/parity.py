"""Single-process references that the engine must equal, and the small models they train.

The reference loops are plain torch and know nothing of units, shards or ranks, except that the global batch is cut into
the same micro-batches: the mean over ranks is the mean over the parts of the batch.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 8  # samples of one micro-step over all ranks
VOCABULARY, WIDTH, LENGTH = 37, 24, 6


class TinyLM(nn.Module):
    """Blocks in a list, tied embedding and head, a frozen and (on request) an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens, targets: int64 [batch, time] -> mean loss, fp32."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x) * self.scale
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Case:
    """One training run."""

    stage: int
    bf16: bool
    accumulation: int
    num_steps: int = 12
    clipping: float = 0.5
    unit_numel: int = 500_000_000
    overlap: bool = True
    zero: dict[str, Any] = field(default_factory=lambda: {"stage3_param_persistence_threshold": 0})

    def config(self, world_size: int) -> dict[str, Any]:
        """Return the engine config of this run."""
        return {
            "train_micro_batch_size_per_gpu": BATCH // world_size,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clipping,
            "steps_per_print": 0,
            "bf16": {"enabled": self.bf16},
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": self.unit_numel,
                "overlap_comm": self.overlap,
                **self.zero,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}},
        }

    def learning_rate(self, step: int) -> float:
        """Return the rate of optimizer step `step`, from 0: the schedule by hand."""
        return 5e-3 * min(1.0, max(0.0, (step - 1) / 4))


@dataclass
class Trajectory:
    """What two runs are compared by."""

    losses: list[float]
    weights: dict[str, Tensor]
    grad_norms: list[float]  # of every step, before clipping


def make_model() -> TinyLM:
    """Return the same model on every call."""
    torch.manual_seed(11)
    return TinyLM()


def micro_batches(case: Case) -> list[list[tuple[Tensor, Tensor]]]:
    """Return the global micro-batches of every step: [step][micro] -> tokens, targets [BATCH, LENGTH]."""
    generator = torch.Generator().manual_seed(5)
    shape = (case.num_steps, case.accumulation, BATCH, LENGTH)
    tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
    targets = (tokens * 3 + 1) % VOCABULARY
    return [
        [(tokens[step, micro], targets[step, micro]) for micro in range(case.accumulation)]
        for step in range(case.num_steps)
    ]


def train_engine(rank: int, world_size: int, case: Case) -> Trajectory:
    """Train through the engine. Runs on every rank; each returns the same losses and whole weights."""
    import torch.distributed as dist

    import launcher

    engine, _, _, _ = launcher.initialize(model=make_model(), config=case.config(world_size))
    part = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    losses, grad_norms = [], []
    for step in micro_batches(case):
        total = torch.zeros((), dtype=torch.float64)
        for tokens, targets in step:
            loss = engine(tokens[part], targets[part])
            engine.backward(loss)
            engine.step()
            total += loss.detach().double()
        grad_norms.append(engine.get_global_grad_norm())
        dist.all_reduce(total)
        losses.append((total / world_size / case.accumulation).item())
    return Trajectory(losses, engine.state_dict(), grad_norms)


def train_fp32(case: Case) -> Trajectory:
    """The plain loop: one process, the whole batch at once."""
    model = make_model()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses, grad_norms = [], []
    for number, step in enumerate(micro_batches(case)):
        optimizer.param_groups[0]["lr"] = case.learning_rate(number)
        total = 0.0
        for tokens, targets in step:
            loss = model(tokens, targets)
            (loss / case.accumulation).backward()
            total += loss.item()
        grad_norms.append(nn.utils.clip_grad_norm_(trained, case.clipping).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total / case.accumulation)
    return Trajectory(losses, dict(model.state_dict()), grad_norms)


def train_mixed(case: Case, world_size: int, grad_norms: list[float]) -> Trajectory:
    """The mixed-precision loop: a bf16 model, fp32 master weights, fp32 gradient sums.

    Each part of the batch that a rank would see goes through the bf16 model by itself, because bf16 gradients of a
    larger batch round differently; everything after that is fp32.

    grad_norms: the norms of the run under test. Each must be the loop's own to 1e-6, and is then used to clip: the
    last bit of a norm depends on the order of its sum, and would flip roundings to bf16 for no reason of substance.
    """
    model = make_model().to(torch.bfloat16)
    trained = [param for param in model.parameters() if param.requires_grad]
    masters = [param.detach().float().clone() for param in trained]
    optimizer = torch.optim.AdamW(masters, lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses = []
    for number, step in enumerate(micro_batches(case)):
        optimizer.param_groups[0]["lr"] = case.learning_rate(number)
        sums = [[torch.zeros_like(master) for master in masters] for _ in range(world_size)]
        total = 0.0
        for tokens, targets in step:
            for rank, (part, target) in enumerate(
                zip(tokens.chunk(world_size), targets.chunk(world_size), strict=True)
            ):
                loss = model(part, target)
                grads = torch.autograd.grad(loss / case.accumulation, trained)
                for accumulated, grad in zip(sums[rank], grads, strict=True):
                    accumulated.add_(grad.float() / world_size)
                total += loss.item()
        for index, master in enumerate(masters):
            master.grad = copy.deepcopy(sums[0][index])
            for rank in range(1, world_size):
                master.grad.add_(sums[rank][index])
        clip_by(masters, case.clipping, grad_norms[number])
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(trained, masters, strict=True):
                param.copy_(master)
        losses.append(total / world_size / case.accumulation)
    return Trajectory(losses, dict(model.state_dict()), grad_norms)


def clip_by(params: list[Tensor], max_norm: float, norm: float) -> None:
    """Clip as `clip_grad_norm_` does, by a norm that is checked first."""
    grads = [param.grad for param in params if param.grad is not None]
    own = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt().item()
    assert abs(own - norm) <= 1e-6 * own
    coefficient = max_norm / (norm + 1e-6)
    if coefficient < 1.0:
        for grad in grads:
            grad.mul_(coefficient)


def worst_relative(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two series."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def weight_distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative 2-norm distance of any weight."""
    assert found.keys() == expected.keys()
    return max(
        ((found[name].double() - expected[name].double()).norm() / expected[name].double().norm()).item()
        for name in expected
    )
